"""The pages on sampling and on research say what the code does: every field is there, every example runs."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from quire import Request, SamplingParams, Structured
from quire.structured.form import KINDS
from quire.testing import fake_engine
from tests.tiny import tiny_config, tiny_llm
from tests.words import toy_tokenizer

DOCS = Path(__file__).resolve().parents[1] / "docs"
SAMPLING = (DOCS / "sampling.md").read_text()
NAMES = {"SamplingParams": SamplingParams, "Structured": Structured}


EXAMPLES = re.findall(r"^(SamplingParams\((\w+)=.*\))", SAMPLING, re.MULTILINE)
FORMS = [
    [cell.strip().strip("`").replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in SAMPLING.partition("| form |")[2].partition("\n\n")[0].splitlines()[2:]
]


def run(params: SamplingParams) -> None:
    engine = fake_engine(vocab_size=40, num_pages=60, eos_ids=(), tokenizer=toy_tokenizer())
    sequences = engine.add(Request(id="r", prompt_token_ids=(1, 2), params=params))
    while engine.has_work:
        engine.step()
    assert {str(sequence.finish_reason) for sequence in sequences} <= {"eos", "stop", "length"}


def test_there_is_an_example_of_every_field():
    assert [name for _, name in EXAMPLES] == [field.name for field in fields(SamplingParams)]


@pytest.mark.parametrize(("example", "name"), EXAMPLES, ids=lambda text: text)
def test_the_example_of_a_field_sets_it_and_runs(example, name):
    params = eval(example, NAMES)
    assert getattr(params, name) != getattr(SamplingParams(), name)
    run(params)


def test_the_example_of_every_form_runs():
    assert [name for name, _, _ in FORMS] == list(KINDS)
    for name, _, example in FORMS:
        form = eval(example, NAMES)
        assert form.kind == name
        if not name.startswith("json"):  # the toy vocabulary cannot spell it
            run(SamplingParams(structured=form, max_tokens=12))


@pytest.mark.slow
def test_the_code_of_the_page_on_research_runs():
    """From top to bottom as it stands, on a model small enough."""
    code = re.findall(r"```python\n(.*?)```", (DOCS / "research.md").read_text(), re.DOTALL)
    assert len(code) == 5
    with tiny_llm(tiny_config(eos_ids=()), max_num_seqs=4, max_rounds=8, debug=True) as llm:
        names = {"llm": llm}
        for block in code:
            exec(block, names)
        llm.engine.audit()
        assert llm.engine.stats().held_pages == 0


@pytest.mark.slow
def test_the_program_of_the_training_page_runs():
    """What it asserts holds in bfloat16, the type it speaks of."""
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "training.md").read_text(), re.DOTALL)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    with tiny_llm(dtype="bfloat16", max_num_seqs=16, num_pages=512) as llm:
        exec(compile(code, "docs/training.md", "exec"), {"llm": llm, "prompts": prompts})


@pytest.mark.slow
def test_the_equinox_model_of_the_docs_is_sampled_trained_and_compared():
    """In a process of its own: the page is written for jax's own settings. tests/tunix runs the page's Flax model."""
    command = [sys.executable, "-m", "tests.tunix.your_model", "Equinox"]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Transpose these tensors: model.layers.0.self_attn.o_proj.weight" in done.stdout
