"""Between text and tokens: tokenizers, chat templates, incremental detokenising.

Owns what a token's bytes are, and which text of a stream is certain. Refuses to know: files, engines, devices.
"""
