"""A model folder small enough to serve in seconds: random weights, a byte-level tokenizer, a template with tools."""

import json
from pathlib import Path

import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, models, pre_tokenizers

from tests.tiny import tiny_config, tiny_tensors

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MAX_LEN = 4096


def write_tiny_folder(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Everything `quire serve` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    vocab_size = len(alphabet) + len(SPECIAL)
    config = tiny_config(vocab_size=vocab_size, max_len=MAX_LEN, eos_ids=(vocab_size - 1,))
    save_file(tiny_tensors(config), folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": config.vocab_size,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": config.num_layers,
                "num_attention_heads": config.attention[0].num_heads,
                "num_key_value_heads": config.attention[0].num_kv_heads,
                "head_dim": config.attention[0].head_dim,
                "max_position_embeddings": config.max_len,
                "rms_norm_eps": config.norm_eps,
                "rope_theta": config.attention[0].rotary.theta,
                "tie_word_embeddings": False,
                "eos_token_id": vocab_size - 1,
            }
        )
    )
    described = {"eos_token": SPECIAL[2]} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder
