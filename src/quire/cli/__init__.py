"""The `quire` command. Each subcommand is a module beside this one.

Flags for the engine come from `EngineConfig`, those for sampling from `SamplingParams`.
"""

import argparse
import dataclasses
import difflib
import logging
import os
import select
import shutil
import signal
import sys
import types
import typing
from collections.abc import Container, Sequence
from pathlib import Path

import shtab

from quire import __version__
from quire.config import EngineConfig
from quire.core.sampling_params import DECLARED, SamplingParams
from quire.distributed.errors import GroupError
from quire.field_error import equivalent_flag
from quire.server.config import ServerConfig

PLAN_KNOBS = (
    "dtype",
    "quantize",
    "page_size",
    "num_pages",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "max_rounds",
    "max_logprobs",
    "memory_budget",
    "attention",
    "matmul",
)
"""The fields of EngineConfig that decide what an engine takes of a device."""
SIMULATE_KNOBS = (*PLAN_KNOBS, "num_host_pages", "prefix_cache", "preemption")
"""Those that decide what a scheduler does, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; errors that a person can mend are one line, without a traceback."""
    try:
        args = _parse(argv)
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("quire").setLevel(logging.INFO)
        status = _run(args)
        sys.stdout.flush()
        return status
    except SystemExit:  # of the parser, which may have printed help
        try:
            sys.stdout.flush()
        except OSError as error:
            return _report(error)
        raise
    except ValueError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except GroupError as error:
        print(f"quire: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # on its way out jax would wait for a process that is gone
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except OSError as error:
        return _report(error)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments. OSError names standard output, which help is printed to."""
    try:
        return build_parser().parse_args(argv)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


def _report(error: OSError) -> int:
    """Print the error that ended a command; return its exit status, as of SIGPIPE if the output's reader is gone."""
    try:
        sys.stdout.flush()  # fails again if it did before
        if not (isinstance(error, BrokenPipeError) and _is_stdout_closed()):
            what = f"{error.filename} cannot be used: " if error.filename else ""
            print(f"quire: {what}{error.strerror or str(error) or type(error).__name__}", file=sys.stderr)
            return 1
        status = 128 + signal.SIGPIPE
    except BrokenPipeError:
        status = 128 + signal.SIGPIPE
    except OSError as of_stdout:
        print(f"quire: standard output cannot be used: {of_stdout.strerror}", file=sys.stderr)
        status = 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of the output goes nowhere at exit
    return status


def _is_stdout_closed() -> bool:
    """True if the reader of standard output is gone. Without a buffer (`python -u`), flushing does not show it."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def build_parser() -> argparse.ArgumentParser:
    """The parser of the `quire` command, with every subcommand and flag."""
    parser = _Parser(prog="quire", description="Language models on a paged KV cache, in JAX.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    shtab.add_argument_to(parser, help="print what makes a shell complete these commands, and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _generate_parser(commands)
    _chat_parser(commands)
    _batch_parser(commands)
    _serve_parser(commands)
    _bench_parser(commands)
    _pull_parser(commands)
    _models_parser(commands)
    _plan_parser(commands)
    _replay_parser(commands)
    _simulate_parser(commands)
    _doctor_parser(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """Parser whose --help leaves out the flags for experts; --help-all shows them too."""

    def __init__(self, **how: typing.Any) -> None:
        super().__init__(**how, formatter_class=_Wide, allow_abbrev=False)
        self._is_mixing = False

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Flags may stand anywhere; one that is unknown is refused with the one that was meant."""
        if self._is_mixing or self._subparsers is not None:  # subcommands cannot be mixed with flags
            return super().parse_known_args(args, namespace)
        self._is_mixing = True  # argparse parses twice, by this method: first the flags, then what is left
        try:
            known, rest = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_mixing = False
        for flag in (word.partition("=")[0] for word in rest if word.startswith("--")):
            near = difflib.get_close_matches(
                flag[2:], [name[2:] for name in self._option_string_actions], n=1, cutoff=0.7
            )
            hint = _hint_for(flag, self._option_string_actions) or (near and f"did you mean --{near[0]}?")
            if hint:
                self.error(f"unrecognized arguments: {' '.join(rest)}; {hint}")
        return known, rest

    def _print_message(self, message, file=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raise what writing raises; argparse itself ignores it."""
        if message:
            (file or sys.stderr).write(message)

    def hide(self) -> None:
        """Offer --help-all, and show a usage line without every flag."""
        positionals = [str(action.metavar) for action in self._actions if not action.option_strings]
        self.usage = f"{self.prog} [options] {' '.join(positionals)}"
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show the flags for experts too, and exit")


def _hint_for(flag: str, flags: Container[str]) -> str | None:
    """What to use instead of a flag that there is not; None if that is not known."""
    if flag in ("--model", "--model-path"):
        return "give MODEL without a flag, as the first argument"
    if flag == "--prompt":
        return "give PROMPT without a flag, after MODEL"
    return equivalent_flag(flag, flags)


class _Wide(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(shutil.get_terminal_size().columns, 118))


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for action in parser._actions:
            action.help = getattr(action, "hidden_help", action.help)
        parser.print_help()
        parser.exit()


def _run(args: argparse.Namespace) -> int:
    if getattr(args, "process_id", 0):
        from quire.following import follow

        follow(args.model, revision=args.revision, **_knobs_of_a_follower(args))
        return 0
    if args.command == "doctor":
        from quire.cli import doctor

        return doctor.run(args)
    if args.command == "generate":
        from quire.cli import generate

        return generate.run(args)
    if args.command == "batch":
        from quire.cli import batch

        return batch.run(args)
    if args.command == "serve":
        from quire.cli import serve

        return serve.run(args)
    if args.command == "bench":
        from quire.cli import bench

        return bench.run(args)
    if args.command == "pull":
        from quire.cli import pull

        return pull.run(args)
    if args.command == "models":
        from quire.cli import models

        return models.run(args)
    if args.command == "plan":
        from quire.cli import plan

        return plan.run(args)
    if args.command == "replay":
        from quire.cli import replay

        return replay.run(args)
    if args.command == "simulate":
        from quire.cli import simulate

        return simulate.run(args)
    from quire.cli import chat

    return chat.run(args)


def _generate_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    text = "Continue one or more prompts. A single one is streamed."
    parser = commands.add_parser("generate", help="continue prompts", description=text)
    _model_argument(parser)
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="*", default=[], help="text to continue; without any, lines of stdin"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    text = "file with a Jinja template; each prompt is then one user message"
    parser.add_argument("--chat-template", metavar="FILE", help=text)
    _sampling_flags(parser, max_tokens=64, temperature=0.0)
    _engine_flags(parser, max_num_seqs=None)


def _chat_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Talk to a model. Ctrl-C ends a reply, Ctrl-D the chat; /help lists commands.",
    )
    _model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    _chat_template_flag(parser)
    _sampling_flags(parser, temperature=0.7)
    _engine_flags(parser, max_num_seqs=4)


def _batch_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    text = (
        "Answer every line of a file, in OpenAI's batch format, or every row of a Parquet file. The same command again "
        "goes on where this one was stopped, however it was."
    )
    parser = commands.add_parser("batch", help="answer the lines of a file", description=text)
    _model_argument(parser)
    text = "lines such as {custom_id, method, url, body}; or .parquet, with a column prompt or messages"
    parser.add_argument("input", metavar="INPUT", type=Path, help=text)
    text = "one answer for each line; .parquet has the input's columns, too"
    parser.add_argument("-o", "--output", metavar="OUTPUT", type=Path, required=True, help=text)
    text = "end before this run could need more tokens, of prompts and answers"
    parser.add_argument("--max-cost", type=int, metavar="N", help=text)
    text = "what lines call the model; by default the name of its file"
    parser.add_argument("--served-model-name", metavar="NAME", help=text)
    _sampling_flags(parser)
    _engine_flags(parser, max_num_seqs=None)


def _serve_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP and gRPC",
        description="Serve a model over HTTP, as OpenAI does, and over gRPC. SIGTERM lets running requests finish.",
    )
    _model_argument(parser)
    group = parser.add_argument_group("server")
    text = "a key that clients need; repeatable. Better from a file, or from QUIRE_API_KEY"
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help=text)
    text = "file with one key per line; fields such as name=alice may follow it"
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help=text)
    text = "a key of administrators; or from QUIRE_ADMIN_KEY"
    group.add_argument("--admin-key", action="append", default=[], metavar="KEY", help=text)
    group.add_argument("--admin-key-file", type=Path, metavar="FILE", help="keys of administrators, one a line")
    expert = parser.add_argument_group("server, for experts")
    _flags(group, expert, ServerConfig)
    _hide(_chat_template_flag(expert))
    _engine_flags(parser)


def _bench_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "bench", help="measure speed", description="Measure speed, with its noise. Compare only within one run."
    )
    kinds = {
        "throughput": "tokens a second of a fixed batch",
        "prefill": "prompt tokens a second",
        "latency": "one stream, by length of context",
        "serve": "requests, as a trace says",
        "fork": "many samples of one prompt",
        "prefix": "first token of a known prompt, and of a new one",
        "host": "what the host adds to each token",
        "steps": "for quire simulate",
    }
    listed = ", ".join(f"{kind} ({text})" for kind, text in kinds.items())
    parser.add_argument("kind", metavar="KIND", choices=list(kinds), help=listed)
    _model_argument(parser, nargs="?")
    group = parser.add_argument_group("measurement")
    group.add_argument("--rows", type=_numbers, default=[8, 32, 64], metavar="N,...", help="sequences (8,32,64)")
    group.add_argument("--prompt-len", type=int, default=64, metavar="N", help="tokens of each prompt (64)")
    group.add_argument("--new-tokens", type=int, default=128, metavar="N", help="tokens generated after it (128)")
    group.add_argument("--contexts", type=_numbers, default=[256, 1024, 4096], metavar="N,...", help="for latency")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="after one to warm up (3)")
    group.add_argument("--against", metavar="WHAT", help="bare, or the command of a peer (see bench/peers)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="for throughput (0)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="for throughput (1)")
    group.add_argument("--url", metavar="URL", help="for serve: a server, such as http://127.0.0.1:8000/v1")
    group.add_argument("--api-key", metavar="KEY", help="for --url; or from QUIRE_API_KEY")
    group.add_argument("--trace", metavar="FILE", help="for serve: a CSV of arrivals, as in bench/traces")
    group.add_argument("--requests", type=int, default=64, metavar="N", help="for serve: the trace's first N (64)")
    group.add_argument("--rate", type=float, default=1.0, metavar="R", help="for serve: requests a second (1)")
    group.add_argument("--scale", type=float, default=0.1, metavar="S", help="for serve: lengths, of the trace's (0.1)")
    group.add_argument("--json", metavar="FILE", help="one JSON object a line; - for standard output")
    _engine_flags(parser, max_num_seqs=None)


def _pull_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    text = (
        "Fetch a model from the hub, verify every file, and print where it is. Interrupted, it goes on the next time."
    )
    parser = commands.add_parser("pull", help="fetch a model from the hub and verify it", description=text)
    _model_argument(parser)


def _models_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    text = "List the models in the hub's cache folder: commit, size, and whether Quire runs them."
    parser = commands.add_parser("models", help="list the models on this disk", description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def _doctor_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    text = (
        "Say what this machine has and whether Quire runs on it: a tiny model, every attention kernel against the "
        "reference, memory and one step, beside what quire plan says of such a device."
    )
    help_text = "say what this machine has and whether Quire runs on it"
    parser = commands.add_parser("doctor", help=help_text, description=text)
    parser.add_argument("--json", metavar="FILE", help="keep it as one JSON object; - for the last line of output")


def _plan_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    text = (
        "Estimate memory and speed of a model on this machine, or with --topology on a slice of accelerators, before "
        "there is a slice. Asks the compiler for those chips if it is installed, else computes from shapes."
    )
    help_text = "estimate memory and speed of a model here, on a TPU slice or on GPUs"
    parser = commands.add_parser("plan", help=help_text, description=text)
    text = "a folder with config.json (weights are not needed), a config.json, or a GGUF file"
    parser.add_argument("model", metavar="MODEL", help=text)
    text = "chips: v5e:2x2, v5p:2x2x1, v6e:2x4, tpu7x:2x2x1, h100:8, a100:8. Default: the CPU of this machine."
    parser.add_argument("--topology", metavar="NAME", help=text)
    parser.add_argument("--json", metavar="FILE", help="one JSON object; - for the last line of standard output")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="do not ask a compiler: seconds")
    _engine_flags(parser, only=PLAN_KNOBS)


def _replay_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    text = "Run the scheduler over a recording, without a device, and say whether every decision is the same."
    parser = commands.add_parser("replay", help="decide again what was recorded, and compare", description=text)
    parser.add_argument("file", metavar="FILE", help="what --record wrote")
    text = "also print the request of this id: its arrival, when it was added and its lengths"
    parser.add_argument("--request", metavar="ID", help=text)


def _simulate_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    text = (
        "What a fleet of engines would do with some traffic: real schedulers, pages and routing under a clock, without "
        "a device. Steps cost what quire bench steps measured here, or what quire plan says of a chip at best."
    )
    parser = commands.add_parser("simulate", help="what a fleet would do with some traffic", description=text)
    group = parser.add_argument_group("cost of a step")
    group.add_argument("--calibration", metavar="FILE", help="what quire bench steps MODEL --json FILE measured")
    text = "or a folder with config.json, a config.json or a GGUF file, with --topology"
    group.add_argument("--model", metavar="MODEL", help=text)
    group.add_argument("--topology", metavar="NAME", help="chips of one replica: v5e:2x2, v6e:1x1, h100:8, ...")
    text = "share of the data sheet's speed that steps reach; 1, the bound itself, is never reached (1)"
    group.add_argument("--efficiency", type=float, default=1.0, metavar="F", help=text)
    group = parser.add_argument_group("traffic")
    text = "a CSV of num_prefill_tokens, num_decode_tokens and perhaps arrived_at and tenant, as in bench/traces"
    group.add_argument("--trace", metavar="FILE", help=text)
    group.add_argument("--recording", metavar="FILE", help="or what --record wrote")
    text = "the first N; a trace begins anew when it ends (all of it)"
    group.add_argument("--requests", type=int, metavar="N", help=text)
    group.add_argument("--scale", type=float, default=1.0, metavar="S", help="lengths, of the trace's (1)")
    text = "requests a second, one line for each (as the trace says)"
    group.add_argument("--rate", type=_rates, default=[None], metavar="R,...", help=text)
    text = "every prompt begins with one of G beginnings of N tokens"
    group.add_argument("--shared-prefix", type=_numbers, metavar="N,G", help=text)
    text = "share of the engine of each tenant that waits, relative to the others (1 each)"
    group.add_argument("--tenant-weights", type=_weights, default={}, metavar="NAME=W,...", help=text)
    group = parser.add_argument_group("fleet")
    group.add_argument("--replicas", type=_numbers, default=[1], metavar="N,...", help="engines, one line for each (1)")
    group.add_argument("--routing", default="prefix", metavar="NAME", help="prefix, least or turns (prefix)")
    text = "find the fewest replicas whose 95th percentile of the time to the first token is at most this"
    group.add_argument("--target-first-token", type=float, metavar="S", help=text)
    text = "the same for the time between tokens"
    group.add_argument("--target-inter-token", type=float, metavar="S", help=text)
    text = "try values of a flag below, or of routing, one line for each: page_size=8,16,64"
    group.add_argument("--sweep", metavar="NAME=A,...", help=text)
    parser.add_argument("--json", metavar="FILE", help="one JSON object a line; - for standard output")
    _engine_flags(parser, only=SIMULATE_KNOBS, **dict.fromkeys(SIMULATE_KNOBS))


def _rates(text: str) -> list[float | None]:
    """Numbers above 0 from a text such as `0.5,1,2`."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [0.0]
    if not all(0 < number < 1e9 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers above 0, such as 0.5,1,2")
    return list(numbers)


def _chat_template_flag(parser: "argparse._ActionsContainer") -> argparse.Action:
    text = "file with a Jinja template to use instead of the model's own"
    return parser.add_argument("--chat-template", metavar="FILE", help=text)


def _model_argument(parser: argparse.ArgumentParser, **how: typing.Any) -> None:
    """MODEL and what belongs to it, the same for every command."""
    text = "a folder, a GGUF file, or org/name[:FILE][@REVISION] on the hub"
    parser.add_argument("model", metavar="MODEL", help=text, **how)
    text = "commit, branch or tag on the hub (main)"
    parser.add_argument("--revision", metavar="NAME", help=text)


def _weights(text: str) -> dict[str, float]:
    """Numbers by name from a text such as `alice=2,bob=0.5`."""
    try:
        return {name: float(weight) for name, _, weight in (part.rpartition("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=NUMBER, such as alice=2,bob=0.5") from None


def _numbers(text: str) -> list[int]:
    """Whole numbers above 0 from a text such as `8,32,64`."""
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers above 0, such as 8,32,64")
    return numbers


def _sampling_flags(parser: argparse.ArgumentParser, **defaults: float) -> None:
    """One flag for each number of SamplingParams that is declared to have one. `defaults` are the command's own."""
    note = "By default what the model's own defaults say, else what is in brackets."
    group = parser.add_argument_group("sampling", note)
    for name, declared in DECLARED.items():
        if declared.flag is not None:
            default = defaults.get(name, declared.default)
            shown = declared.text if default is None else f"{declared.text} ({default:g})"
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, type=declared.kind, metavar=declared.flag, help=shown)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")
    parser.set_defaults(sampling_defaults=defaults)


def _engine_flags(parser: _Parser, only: Container[str] | None = None, **defaults: object) -> None:
    """One flag for each field of EngineConfig, or of those in `only`."""
    groups = parser.add_argument_group("engine"), parser.add_argument_group("engine, for experts")
    _flags(*groups, EngineConfig, only, **defaults)
    parser.hide()


def _flags(
    ordinary: "argparse._ArgumentGroup",
    expert: "argparse._ArgumentGroup",
    config: type,
    only: Container[str] | None = None,
    **defaults: object,
) -> None:
    """One flag for each field of a config, or of those in `only`."""
    for field in (field for field in dataclasses.fields(config) if only is None or field.name in only):
        group = expert if field.metadata.get("expert") else ordinary
        flag, text = "--" + field.name.replace("_", "-"), field.metadata["help"].replace("%", "%%")
        default = defaults.get(field.name, field.default)
        if field.type is bool:
            switch = "store_true" if default is False else argparse.BooleanOptionalAction
            action = group.add_argument(flag, action=switch, default=default, help=text)
        else:
            kind, many = _plain(field.type)
            shown = f"{text}; repeatable" if many else text if default is None else f"{text} ({default})"
            action = "append" if many else "store"
            metavar = "N" if kind is int else "NAME"
            default = list(typing.cast(tuple, default)) if many else default
            action = group.add_argument(flag, type=kind, default=default, metavar=metavar, help=shown, action=action)
        if group is expert:
            _hide(action)


def _hide(action: argparse.Action) -> None:
    """Show a flag with --help-all only."""
    action.hidden_help, action.help = action.help, argparse.SUPPRESS  # pyright: ignore


def _plain(annotation: typing.Any) -> tuple[type, bool]:
    """The type of one value, and whether there may be many: `int` for `int | None`, `str` for `tuple[str, ...]`."""
    if isinstance(annotation, types.UnionType):
        return next(kind for kind in typing.get_args(annotation) if kind is not type(None)), False
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


def knobs_of(config: type, args: argparse.Namespace) -> dict[str, typing.Any]:
    """The fields of a config from parsed flags."""
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(config)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def engine_knobs(args: argparse.Namespace) -> dict[str, typing.Any]:
    """The engine's fields from parsed flags."""
    knobs = knobs_of(EngineConfig, args)
    if knobs["max_num_seqs"] is None and (knobs["num_processes"] > 1 or knobs["process_id"]):
        knobs["max_num_seqs"] = EngineConfig.max_num_seqs  # only the leader knows how many prompts there are
    return knobs


def _knobs_of_a_follower(args: argparse.Namespace) -> dict[str, typing.Any]:
    """The same that the leader of a group comes to from the same flags."""
    if args.command != "bench":
        return engine_knobs(args)
    from quire.cli import bench

    return bench.knobs(args)


def sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """What the flags say; else what the model's `defaults` say; else the command's own defaults."""
    own = dict(args.sampling_defaults)
    if defaults != SamplingParams():
        own["temperature"] = defaults.temperature
    names = [*(name for name, declared in DECLARED.items() if declared.flag is not None), "stop"]
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return dataclasses.replace(defaults, **own | given)


def given_sampling(args: argparse.Namespace) -> dict[str, typing.Any]:
    """What the flags say, by the names of a request's fields."""
    names = {declared.wire_name: name for name, declared in DECLARED.items() if declared.flag is not None}
    given = {wire_name: getattr(args, name) for wire_name, name in (names | {"stop": "stop"}).items()}
    return {wire_name: value for wire_name, value in given.items() if value is not None}


def find_model_for(args: argparse.Namespace) -> Path:
    """The MODEL of a command that samples. Flags that cannot work with it are refused before its weights are read."""
    from quire.checkpoint.load import find_model, read_config

    sampling_params(args, SamplingParams())
    knobs = engine_knobs(args)
    if knobs["max_num_seqs"] is None:
        knobs["max_num_seqs"] = 1
    EngineConfig(**knobs)
    check_chat_template(args)
    _check_max_tokens(args.max_tokens, args.max_model_len, "--max-model-len")
    path = find_model(args.model, args.revision)
    _check_max_tokens(args.max_tokens, read_config(path).max_len, "the model's length")
    return path


def check_chat_template(args: argparse.Namespace) -> None:
    """Refuse a --chat-template that cannot be read or does not compile, before anything is loaded."""
    if getattr(args, "chat_template", None) is not None:
        from quire.checkpoint.tokenizer_files import read_chat_template

        read_chat_template(Path(args.chat_template))


def _check_max_tokens(max_tokens: int | None, limit: int | None, what: str) -> None:
    """Refuse more new tokens than fit beside the shortest prompt, of one token."""
    if max_tokens is not None and limit is not None and max_tokens >= limit:
        raise ValueError(f"--max-tokens {max_tokens} and a prompt are more than {what}, {limit}; lower it")
