"""The gRPC server: the messages of quire.proto and the calls that handle them."""
