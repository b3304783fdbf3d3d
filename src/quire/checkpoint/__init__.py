"""Models from files and from the hub: configs, weights, tokenizers.

Owns the formats (safetensors, GGUF, JSON) and their limits; nothing in a file is ever executed. Refuses to know:
engines and requests. What a model's tensors mean is said by its architecture's file in `device/models`.
"""
