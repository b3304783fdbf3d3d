"""What is in deploy/ starts: its commands are ones that the command line takes, and it stops as the server wants to."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from quire.cli import build_parser
from quire.server.config import ServerConfig

ROOT = Path(__file__).parents[1]
CONTAINERFILE = (ROOT / "deploy/Containerfile").read_text()


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(ROOT / "deploy/quire.service")
    return parser


def instruction(name: str) -> str:
    """The last one of its kind, over all its lines."""
    found = re.findall(rf"^{name} (.*(?:\\\n.*)*)", CONTAINERFILE, re.MULTILINE)
    return found[-1].replace("\\\n", " ")


def test_the_units_command_is_one_that_quire_takes():
    program, *args = shlex.split(unit()["Service"]["ExecStart"])
    assert Path(program).name == "quire"
    parsed = build_parser().parse_args(args)
    assert parsed.command == "serve"
    assert parsed.host == "127.0.0.1"
    assert (parsed.api_key, parsed.admin_key) == ([], []), "a key on the command line is for everybody to read"
    names = {line.split("=")[1].split(":")[0] for line in lines("LoadCredential")}
    assert names == {parsed.api_key_file.name, parsed.admin_key_file.name}
    assert {parsed.api_key_file.parent, parsed.admin_key_file.parent} == {Path("%d")}
    assert int(unit()["Service"]["TimeoutStopSec"]) > parsed.drain_timeout_s


def lines(key: str) -> list[str]:
    return [line for line in (ROOT / "deploy/quire.service").read_text().splitlines() if line.startswith(f"{key}=")]


def test_the_unit_gives_the_server_little():
    service = unit()["Service"]
    for key in ("DynamicUser", "NoNewPrivileges", "PrivateTmp", "ProtectHome"):
        assert service[key] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert service["KillSignal"] == "SIGTERM"


def test_systemd_understands_the_unit(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze")
    program = tmp_path / "quire"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / "quire.service"
    copy.write_text((ROOT / "deploy/quire.service").read_text().replace("/opt/quire/bin/quire", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")


def test_prometheus_understands_the_rules():
    if not shutil.which("promtool"):
        pytest.skip("no promtool")
    command = ["promtool", "check", "rules", str(ROOT / "deploy/alerts.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def alert(name: str) -> str:
    """The expression of an alert."""
    rules = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())["groups"][0]["rules"]
    (found,) = [rule["expr"] for rule in rules if rule["alert"] == name]
    return found


def test_a_stalled_engine_is_one_that_is_not_healthy():
    """How long a step may take depends on its tokens, which the server knows and a rule does not."""
    assert alert("QuireEngineStalled") == "quire_healthy == 0"


def test_probes_that_fail_are_no_errors_of_requests():
    selector = re.search(r'route!~"([^"]+)"', alert("QuireServerErrors"))
    assert selector
    for route in ("/health", "/livez", "/readyz"):
        assert re.fullmatch(selector[1], route)
    assert not re.fullmatch(selector[1], "/v1/completions")


def test_the_images_command_is_one_that_quire_takes():
    program, *args = json.loads(instruction("ENTRYPOINT")) + json.loads(instruction("CMD"))
    assert program == "quire"
    parsed = build_parser().parse_args(args)
    assert parsed.host == "0.0.0.0"
    assert parsed.api_key_file is not None, "reached from elsewhere, so it needs a key"
    assert parsed.port == int(instruction("EXPOSE")) == ServerConfig().port
    stop = re.search(r"--stop-timeout (\d+)", CONTAINERFILE)
    assert stop
    assert int(stop[1]) > parsed.drain_timeout_s


def test_the_image_runs_as_nobody_and_sends_sigterm():
    assert int(instruction("USER")) >= 10_000
    assert instruction("STOPSIGNAL") == "SIGTERM"
    assert CONTAINERFILE.rindex("\nUSER ") < CONTAINERFILE.rindex("\nENTRYPOINT ")


def test_the_image_is_built_from_the_sources_only():
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in kept
    copied = [
        word for line in re.findall(r"^COPY (?!--from)(.*)", CONTAINERFILE, re.MULTILINE) for word in line.split()
    ]
    for name in set(copied) - {"./"}:
        assert (ROOT / name).exists()
        assert any(line == f"!{name}" or line.startswith(f"!{name}/") for line in kept)


def test_the_image_is_made_from_the_wheel_and_has_no_compiler():
    build, final = CONTAINERFILE.split("\nFROM ")[1:] if CONTAINERFILE.count("\nFROM ") > 1 else (None, None)
    assert build
    assert final
    assert "uv build" in build
    assert "--no-deps /dist/quire_llm-*.whl" in final
    assert not re.search(r"^COPY", final, re.MULTILINE), "nothing but the wheel and its dependencies is taken over"
    assert not re.search(r"apt-get|g\+\+|cmake", final)
