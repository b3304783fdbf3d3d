"""`quire doctor`: what this machine has, and whether Quire runs on it."""

import importlib.metadata
import platform
import sys

PACKAGES = ("quire", "jax", "jaxlib", "numpy", "tokenizers", "safetensors", "gguf", "huggingface-hub")


def run() -> int:
    """Print versions, devices and memory, then run one step of a tiny model. Returns 0 when it works."""
    print(f"python       {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in PACKAGES:
        print(f"{name:<12} {_version(name)}")
    try:
        _devices()
        _try_it()
    except Exception as error:  # whatever is broken here is what the doctor is for
        print(f"\nquire does not run here: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print("\nquire runs here.")
    return 0


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> None:
    import jax

    from quire.device import memory, native
    from quire.device.mesh import make_mesh
    from quire.engine.pool_size import default_pool_bytes

    for device in jax.local_devices():
        print(f"device       {device.device_kind} ({device.platform})")
    mesh = make_mesh()
    num_bytes = default_pool_bytes(memory.available_bytes(mesh), is_host_memory=memory.is_host_memory(mesh))
    print(f"KV pool      {num_bytes / 2**30:.1f} GiB by default")
    print(f"native       {native.unavailable_reason() or f'built; uses {native.instruction_sets()[-1]}'}")


def _try_it() -> None:
    """Two sequences of a random model through the whole engine, audited."""
    import numpy as np

    from quire import LLM, AttentionConfig, ModelConfig, SamplingParams
    from quire.device.mesh import make_mesh
    from quire.device.models.weight_specs import TensorSpec
    from quire.device.models.weights import load_params

    config = ModelConfig(
        architecture="llama",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        attention=(AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),),
        max_len=64,
        tie_embeddings=True,
    )
    rng = np.random.default_rng(0)

    def random_tensor(tensor: TensorSpec) -> np.ndarray:
        return rng.standard_normal(tensor.shape).astype(np.float32)

    mesh = make_mesh()
    params = load_params(config, random_tensor, mesh=mesh, dtype="float32")
    knobs = {"num_pages": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16, "compile_cache": ""}
    with LLM.from_params(config, params, mesh=mesh, quiet=True, dtype="float32", debug=True, **knobs) as llm:
        outputs = llm.generate([[1, 2, 3], [4]], SamplingParams(temperature=0, max_tokens=8), progress=False)
        if [len(output.outputs[0].token_ids) for output in outputs] != [8, 8]:
            raise RuntimeError("a tiny model did not generate as many tokens as it should")
        stats = llm.engine.stats()
        if stats.held_pages or stats.compiles_after_warmup:
            raise RuntimeError(f"pages held: {stats.held_pages}, late compiles: {stats.compiles_after_warmup}")
    print(f"self-test    16 tokens of a tiny model, {stats.programs} programs, no page held, nothing compiled late")
