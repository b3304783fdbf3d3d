"""The `quire` command. Each subcommand is a module beside this one; flags for the engine come from `EngineConfig`."""

import argparse
import dataclasses
import logging
import shutil
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path

import shtab

from quire import __version__
from quire.config import EngineConfig
from quire.server.config import ServerConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; errors that a person can mend are one line, without a traceback."""
    parser = build_parser()
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("quire").setLevel(logging.INFO)
    try:
        return _run(args)
    except ValueError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of the `quire` command, with every subcommand and flag."""
    parser = _Parser(prog="quire", description="Language models on a paged KV cache, in JAX.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    shtab.add_argument_to(parser, help="print what makes a shell complete these commands, and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _generate_parser(commands)
    _chat_parser(commands)
    _serve_parser(commands)
    _bench_parser(commands)
    commands.add_parser("doctor", help="say what this machine has and whether Quire runs on it")
    return parser


class _Parser(argparse.ArgumentParser):
    """Help that fits on a screen: flags that few need are shown by --help-all."""

    def __init__(self, **how: typing.Any) -> None:
        super().__init__(**how, formatter_class=_Wide, allow_abbrev=False)

    def hide(self) -> None:
        """Offer --help-all, and show a usage line without every flag."""
        positionals = [str(action.metavar) for action in self._actions if not action.option_strings]
        self.usage = f"{self.prog} [options] {' '.join(positionals)}"
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show the flags for experts too, and exit")


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
    if args.command == "doctor":
        from quire.cli import doctor

        return doctor.run()
    if args.command == "generate":
        from quire.cli import generate

        return generate.run(args)
    if args.command == "serve":
        from quire.cli import serve

        return serve.run(args)
    if args.command == "bench":
        from quire.cli import bench

        return bench.run(args)
    from quire.cli import chat

    return chat.run(args)


def _generate_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser("generate", help="continue prompts", description="Continue one or more prompts.")
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, or org/name@commit on the hub")
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="*", default=[], help="text to continue; without any, lines of stdin"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    _sampling_flags(parser, max_tokens=64, temperature=0.0)
    _engine_flags(parser, max_num_seqs=None)


def _chat_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "chat", help="talk to a model", description="Talk to a model. Ctrl-C ends a reply, Ctrl-D the chat."
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, or org/name@commit on the hub")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    _sampling_flags(parser, max_tokens=None, temperature=0.7)
    _engine_flags(parser, max_num_seqs=4)


def _serve_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP and gRPC",
        description="Serve a model over HTTP, as OpenAI does, and over gRPC. SIGTERM lets running requests finish.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, or org/name@commit on the hub")
    group = parser.add_argument_group("server")
    text = "a key that clients need; repeatable. Better from a file, or from QUIRE_API_KEY"
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help=text)
    text = "keys, one a line, in the clear or as sha256:HEX"
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help=text)
    text = "a key of administrators; or from QUIRE_ADMIN_KEY"
    group.add_argument("--admin-key", action="append", default=[], metavar="KEY", help=text)
    group.add_argument("--admin-key-file", type=Path, metavar="FILE", help="keys of administrators, one a line")
    _flags(group, parser.add_argument_group("server, for experts"), ServerConfig)
    _engine_flags(parser)


def _bench_parser(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "bench", help="measure speed", description="Measure speed, with its noise. Compare only within one run."
    )
    kinds = {
        "throughput": "tokens a second of a fixed batch",
        "prefill": "prompt tokens a second",
        "latency": "one stream, at each length of context",
        "serve": "requests that arrive when a trace says",
        "fork": "many samples of one prompt, against cached single requests",
        "prefix": "time to the first token of a prompt that is known, against one that is new",
        "host": "what the host adds to each token",
    }
    listed = ", ".join(f"{kind} ({text})" for kind, text in kinds.items())
    parser.add_argument("kind", metavar="KIND", choices=list(kinds), help=listed)
    text = "a folder, a GGUF file, or org/name@commit on the hub; not with --url"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)
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


def _numbers(text: str) -> list[int]:
    """Whole numbers above 0 from a text such as `8,32,64`."""
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def _sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int | None, temperature: float) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"new tokens ({max_tokens or 'what fits'})"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0 for the likeliest token ({temperature:g})",
    )
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest share (1)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0 for all (0)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="leave out the unlikely (0)")
    group.add_argument("--seed", type=int, metavar="N", help="draw the same every time")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")


def _engine_flags(parser: _Parser, **defaults: object) -> None:
    """One flag for each field of EngineConfig."""
    _flags(
        parser.add_argument_group("engine"), parser.add_argument_group("engine, for experts"), EngineConfig, **defaults
    )
    parser.hide()


def _flags(
    ordinary: "argparse._ArgumentGroup", expert: "argparse._ArgumentGroup", config: type, **defaults: object
) -> None:
    """One flag for each field of a config."""
    for field in dataclasses.fields(config):
        group = expert if field.metadata.get("expert") else ordinary
        flag, text = "--" + field.name.replace("_", "-"), field.metadata["help"]
        default = defaults.get(field.name, field.default)
        if field.type is bool:
            switch = "store_true" if default is False else argparse.BooleanOptionalAction
            action = group.add_argument(flag, action=switch, default=default, help=text)
        else:
            kind = _plain(field.type)
            shown = text if default is None else f"{text} ({default})"
            metavar = "N" if kind is int else "NAME"
            action = group.add_argument(flag, type=kind, default=default, metavar=metavar, help=shown)
        if group is expert:
            action.hidden_help, action.help = action.help, argparse.SUPPRESS  # pyright: ignore


def _plain(annotation: typing.Any) -> type:
    """The type of an annotation without None: `int` for `int | None`."""
    if isinstance(annotation, types.UnionType):
        return next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    return annotation


def engine_knobs(args: argparse.Namespace) -> dict[str, typing.Any]:
    """The engine's fields from parsed flags."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}


def sampling_knobs(args: argparse.Namespace) -> dict[str, typing.Any]:
    """The fields of SamplingParams from parsed flags."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
    return {name: getattr(args, name) for name in names}
