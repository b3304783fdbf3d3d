"""What a model takes and gives on accelerators that are not here: memory, collectives, and the time of a step at best.

`quire plan` prints it, and `quire doctor` compares it with what a device does. Upper bounds from data sheets and
shapes, never measurements.
"""
