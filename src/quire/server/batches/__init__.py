"""Batches: many requests from a file, one a line, answered into another; what `quire batch` and the server share.

Lines are in OpenAI's format. Answers are written in the order of the lines, and what an answer is called follows from
its line: whoever was stopped in the middle finds in the output how far it came, and goes on from there.
"""
