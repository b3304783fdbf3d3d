"""The gRPC server: the messages of quire.proto and the calls that answer them. Refuses to know: HTTP."""
