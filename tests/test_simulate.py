"""A simulation decides as an engine does, and tells of it; its inputs are read as a stranger's."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire import SamplingParams
from quire.cli import main
from quire.core.errors import RequestError
from quire.core.request import Request
from quire.core.scheduler_config import SchedulerConfig
from quire.simulate import traffic as traffic_module
from quire.simulate.cost import Calibration, PlanSize, fit, load_calibration
from quire.simulate.engine import SimulatedEngine, shared_names
from quire.simulate.fleet import run_fleet
from quire.simulate.report import fewest_replicas, summarise
from quire.simulate.traffic import Arrival, Traffic, read_recording, read_trace
from quire.testing import fake_engine

CONFIG = SchedulerConfig(
    page_size=4, num_pages=64, max_num_seqs=4, max_num_batched_tokens=16, max_num_samples=16, max_rounds=4
)
CALIBRATION = Calibration(
    model="none",
    machine="none",
    knobs={"page_size": 4, "num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_rounds": 4},
    decode={4: 0.01},
    mixed={16: 0.02},
    dispatch=0.001,
    row=0.0001,
    decode_token=0.0002,
    decode_position=1e-6,
    mixed_token=0.0003,
    mixed_position=1e-6,
    seconds_per_move=0.5,
    pages_per_move=4,
    error=0.0,
)


def some_traffic(count: int, rate: float, seed: int = 0) -> Traffic:
    rng, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        arrivals.append(Arrival(at, rng.randint(1, 30), [rng.randint(1, 20)]))
    return Traffic(arrivals)


def write_trace(path: Path, rows: int = 50, header: str = "arrived_at,num_prefill_tokens,num_decode_tokens") -> Path:
    times = "" if not header.startswith("arrived_at") else "{at},"
    lines = [f"{times.format(at=i / 10)}{1 + i % 17},{1 + i % 7}" for i in range(rows)]
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


# -- one engine ------------------------------------------------------------------------------------------------------


def test_every_step_is_the_engines_own():
    """The same arrivals between the same steps: an engine and a simulation make the same plans."""
    traffic = some_traffic(60, rate=1e9)
    knobs = {"page_size": 4, "num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_rounds": 4}
    engine = fake_engine(vocab_size=1000, num_host_pages=0, max_model_len=64, **knobs)
    config = replace(CONFIG, max_num_samples=engine.config.max_num_samples)
    simulated, rng, added = SimulatedEngine(config, CALIBRATION, traffic), random.Random(1), 0
    plans: tuple[list, list] = ([], [])

    def note(scheduler, plan) -> list:
        return [
            [(r.sequence.arrival, r.first, r.num_tokens, r.max_rounds) for r in plan.rows],
            scheduler.tables.num_available,
        ]

    while added < 60 or engine.has_work:
        for _ in range(rng.randint(0, 3)):
            if added < 60:
                arrival = traffic.arrivals[added]
                prompt = tuple(rng.randrange(1, 1000) for _ in range(arrival.prompt_len))
                params = SamplingParams(temperature=0, max_tokens=arrival.new_tokens[0], ignore_eos=True)
                engine.add(Request(id=str(added), prompt_token_ids=prompt, params=params))
                simulated.add(added, arrival)
                added += 1
        engine.step(
            meanwhile=lambda: (
                plans[0].append(note(engine.scheduler, engine.scheduler.in_flight))
                if engine.scheduler.in_flight
                else None
            )
        )
        if simulated.begin() is not None:
            plans[1].append(note(simulated.scheduler, simulated.scheduler.in_flight))
            simulated.end()
    shifted = [[[(arrival - 1, *rest) for arrival, *rest in rows], free] for rows, free in plans[0]]
    assert shifted == plans[1]


def test_nothing_is_left_and_nobody_is_lost():
    outcome = run_fleet(some_traffic(300, rate=100), CONFIG, CALIBRATION, replicas=3, routing="least")
    assert all(first > arrived for first, arrived in zip(outcome.first_token, outcome.arrived, strict=True))
    assert all(last >= first for last, first in zip(outcome.last_token, outcome.first_token, strict=True))
    wanted = [arrival.new_tokens[0] for arrival in some_traffic(300, rate=100).arrivals]
    assert list(outcome.num_tokens) == wanted


@pytest.mark.parametrize("lengths", [[100], [100, 2], [2, 100]])
def test_a_request_of_which_one_sample_can_never_fit_is_refused(lengths):
    config = SchedulerConfig(page_size=4, num_pages=4, max_num_seqs=4, max_num_batched_tokens=16, max_num_samples=16)
    with pytest.raises(RequestError, match=r"needs 26 pages for a prompt of 4 \+ 100 new tokens"):
        run_fleet(Traffic([Arrival(0.0, 4, lengths)]), config, CALIBRATION)


def test_a_simulation_repeats_itself():
    runs = [run_fleet(some_traffic(200, rate=50), CONFIG, CALIBRATION, replicas=2) for _ in range(2)]
    assert runs[0].last_token == runs[1].last_token


def test_time_is_what_the_steps_cost():
    """One request alone: its prompt in one mixed step, then rounds of four."""
    outcome = run_fleet(Traffic([Arrival(5.0, 10, [9])]), CONFIG, CALIBRATION)
    mixed = CALIBRATION.seconds(PlanSize(1, 10, 1, 55))
    decode = [CALIBRATION.seconds(PlanSize(1, 1, 4, first + 1)) for first in (10, 14)]
    assert outcome.first_token[0] == pytest.approx(5.0 + mixed)
    assert outcome.last_token[0] == pytest.approx(5.0 + mixed + sum(decode))
    assert outcome.busy_seconds == pytest.approx(mixed + sum(decode))


def test_a_small_pool_preempts_and_ends():
    config = replace(CONFIG, num_pages=16)
    outcome = run_fleet(some_traffic(100, rate=1000), config, CALIBRATION)
    assert outcome.preemptions > 0
    assert min(outcome.num_tokens) > 0


def test_swapping_takes_its_time():
    """Pages go to host memory and come back, in moves of four, each of half a second."""
    config = replace(CONFIG, num_pages=16, num_host_pages=16, preemption="swap")
    slow = run_fleet(some_traffic(40, rate=1000), config, CALIBRATION)
    fast = run_fleet(some_traffic(40, rate=1000), config, replace(CALIBRATION, seconds_per_move=0.0))
    assert slow.preemptions == fast.preemptions > 0
    assert slow.busy_seconds - fast.busy_seconds >= slow.preemptions * 2 * 0.5


def test_samples_share_their_prompt():
    outcome = run_fleet(Traffic([Arrival(0.0, 16, [3, 5, 2])]), CONFIG, CALIBRATION)
    assert outcome.num_tokens[0] == 10
    assert outcome.cached_tokens >= 2 * 15


def crowded(streams: int, tenants: tuple[str, str]) -> Traffic:
    """Streams of one tenant, open all the time, and short requests of another, one after the other."""
    long, short = ({"tenant": name} for name in tenants)
    arrivals = [Arrival(0.0, 12, [60], more=long) for _ in range(streams * 4)]
    arrivals += [Arrival(5.0 + 2 * i, 12, [16], more=short) for i in range(20)]
    return Traffic(arrivals)


@pytest.mark.parametrize("streams", [30, 250])
def test_a_tenant_does_not_wait_for_the_streams_of_another(streams):
    """Its time to the first token is that of its prompt in a step with others, and of the step before."""
    config = replace(CONFIG, num_pages=512, max_num_seqs=8, max_num_samples=8, max_num_batched_tokens=64)
    cost = replace(CALIBRATION, decode={8: 0.01}, mixed={64: 0.02})
    fair = run_fleet(crowded(streams, ("a", "b")), config, cost)
    alone = run_fleet(Traffic(crowded(streams, ("a", "b")).arrivals[-20:]), config, cost)
    fifo = run_fleet(crowded(streams, ("a", "a")), config, cost)
    waits = [max(np.array(one.first_token)[-20:] - np.array(one.arrived)[-20:]) for one in (fair, alone, fifo)]
    dispatch = cost.seconds(PlanSize(8, 8, 4, 8 * 76)) + cost.seconds(PlanSize(8, 64, 1, 64 * 40))
    assert waits[0] <= 3 * waits[1] + dispatch
    assert waits[0] < waits[2] / 5
    assert max(fair.last_token) <= 1.03 * max(fifo.last_token)
    own = summarise(fair, 1)["tenants"]
    assert own["b"]["requests"] == 20
    assert own["b"]["first_token_s_p95"] <= waits[0]
    assert "tenants" not in summarise(fifo, 1)


def test_weights_of_tenants_decide_who_waits():
    traffic = Traffic([Arrival(0.0, 12, [20], more={"tenant": name}) for _ in range(60) for name in "ab"])
    outcome = run_fleet(traffic, CONFIG, CALIBRATION, tenant_weights={"a": 4})
    own = summarise(outcome, 1)["tenants"]
    assert own["a"]["first_token_s_mean"] < 0.7 * own["b"]["first_token_s_mean"]


# -- the fleet -------------------------------------------------------------------------------------------------------


def test_prefixes_meet_where_they_are_cached():
    """A beginning in common is found by who has it: with routing by prefix more often than in turn."""
    config = replace(CONFIG, num_pages=40)
    traffic = some_traffic(400, rate=60).sharing(32, groups=8)
    cached = {
        routing: run_fleet(traffic, config, CALIBRATION, replicas=4, routing=routing).cached_tokens
        for routing in ("prefix", "turns")
    }
    assert cached["prefix"] > 1.2 * cached["turns"] > 0


def test_more_engines_are_no_slower():
    traffic = some_traffic(300, rate=100)
    waits = [
        summarise(run_fleet(traffic, CONFIG, CALIBRATION, replicas=n, routing="least"), n)["first_token_s_p95"]
        for n in (1, 2, 8)
    ]
    assert waits == sorted(waits, reverse=True)


def test_the_fewest_replicas_are_found():
    def simulate(replicas: int) -> dict:
        return {"replicas": replicas, "first_token_s_p95": 10 / replicas}

    enough, tried = fewest_replicas(simulate, first_token_s=0.8, inter_token_s=None)
    assert enough["replicas"] == 13
    assert len(tried) == 8
    with pytest.raises(ValueError, match="a request alone is slower"):
        fewest_replicas(lambda n: {"replicas": n, "first_token_s_p95": 1.0}, first_token_s=0.5, inter_token_s=None)
    with pytest.raises(ValueError, match="target"):
        fewest_replicas(simulate, first_token_s=None, inter_token_s=None)


def test_an_unknown_policy_is_refused():
    for wrong in ({"routing": "best"}, {"replicas": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            run_fleet(some_traffic(1, rate=1), CONFIG, CALIBRATION, **wrong)


# -- what a step costs -----------------------------------------------------------------------------------------------


def test_costs_are_found_again():
    """Steps that cost exactly what a calibration says give that calibration back."""
    true = replace(CALIBRATION, decode={4: 0.01, 8: 0.015}, mixed={16: 0.02, 64: 0.05})
    rng, steps = random.Random(0), []
    for _ in range(400):
        rows, rounds = rng.randint(1, 8), rng.choice((1, 4, 16))
        size = PlanSize(rows, rows, rounds, rows * rng.randint(1, 5000))
        if rng.random() < 0.5:
            size = PlanSize(rows, rows + rng.randint(1, 50), 1, rng.randint(1, 100_000))
        steps.append((size, true.seconds(size)))
    about = {"model": "none", "machine": "none", "knobs": true.knobs, "seconds_per_move": 0.0, "pages_per_move": 1}
    found = fit(steps, decode_shapes=[4, 8], mixed_shapes=[16, 64], **about)
    assert found.error < 1e-6
    for size in (PlanSize(3, 3, 4, 600), PlanSize(8, 40, 1, 5000)):
        assert found.seconds(size) == pytest.approx(true.seconds(size))


def test_a_shape_that_no_step_had_costs_what_its_neighbour_does():
    rng = random.Random(0)
    sizes = [PlanSize(n, n, rounds, n * rng.randint(1, 5000)) for n in (5, 6, 7, 8) for rounds in (1, 4, 16)] * 9
    sizes += [PlanSize(rng.randint(1, 8), tokens, 1, rng.randint(1, 100_000)) for tokens in range(20, 60)]
    true = replace(CALIBRATION, decode={8: 0.015, 16: 0.015}, mixed={64: 0.05, 256: 0.05})
    about = {"model": "none", "machine": "none", "knobs": {}, "seconds_per_move": 0.0, "pages_per_move": 1}
    steps = [(size, true.seconds(size)) for size in sizes]
    found = fit(steps, decode_shapes=[4, 8, 16], mixed_shapes=[16, 64, 256], **about)
    assert found.decode[4] == found.decode[8] == found.decode[16]
    assert found.mixed[16] == found.mixed[64] == found.mixed[256]
    for size in (PlanSize(3, 3, 4, 30), PlanSize(12, 12, 4, 120), PlanSize(2, 200, 1, 1000)):
        assert found.seconds(size) == pytest.approx(true.seconds(size), rel=0.02)


def test_noise_does_not_make_steps_cheaper():
    """Of steps that take longer now and then, the sum is predicted, not the usual one."""
    rng = np.random.default_rng(0)
    sizes = [PlanSize(4, 4, 4, 100)] * 2000
    steps = [(size, CALIBRATION.seconds(size) * rng.lognormal(0, 0.7)) for size in sizes]
    about = {"model": "none", "machine": "none", "knobs": {}, "seconds_per_move": 0.0, "pages_per_move": 1}
    found = fit(steps, decode_shapes=[4], mixed_shapes=[16], **about)
    assert found.seconds(sizes[0]) == pytest.approx(np.mean([took for _, took in steps]), rel=0.01)
    assert min(found.dispatch, found.row, found.decode_position, found.decode[4]) >= 0


def test_a_calibration_is_kept_in_a_file(tmp_path):
    path = tmp_path / "calibration.json"
    CALIBRATION.save(path)
    assert load_calibration(path) == CALIBRATION


@pytest.mark.parametrize(
    "change",
    [
        {"format": "x"},
        {"decode": {}},
        {"decode": {"4": -1}},
        {"row": "1"},
        {"knobs": 3},
        {"dispatch": 1e999},
        {"more": 1},
        {"mixed": {"x": 1}},
    ],
)
def test_another_file_is_refused(change, tmp_path):
    path = tmp_path / "calibration.json"
    CALIBRATION.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="calibration="):
        load_calibration(path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_calibration(tmp_path / "nothing")


# -- traffic ---------------------------------------------------------------------------------------------------------


def test_a_trace_is_read_scaled_and_repeated(tmp_path):
    path = write_trace(tmp_path / "trace.csv")
    traffic = read_trace(path, requests=120, scale=2, max_len=30)
    assert len(traffic.arrivals) == 120
    assert traffic.arrivals[3] == Arrival(pytest.approx(0.3), 8, [8])
    assert traffic.arrivals[53].new_tokens == traffic.arrivals[3].new_tokens
    assert all(a.at <= b.at for a, b in zip(traffic.arrivals, traffic.arrivals[1:], strict=False))
    assert all(one.prompt_len + one.new_tokens[0] <= 30 for one in traffic.arrivals)
    assert traffic.at_rate(5).seconds == pytest.approx(120 / 5)
    untimed = read_trace(write_trace(tmp_path / "untimed.csv", header="num_prefill_tokens,num_decode_tokens"))
    assert untimed.seconds > 0


LENGTHS = "num_prefill_tokens,num_decode_tokens"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2\n",
        f"{LENGTHS}\n1,x\n",
        f"{LENGTHS}\n-1,2\n",
        f"arrived_at,{LENGTHS}\nnan,1,2\n",
        f"{LENGTHS}\n1\n",
    ],
)
def test_no_other_csv_is_read(text, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="trace="):
        read_trace(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(tmp_path / "nothing")


def test_a_csv_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(traffic_module, "MAX_CSV_ROWS", 10)
    with pytest.raises(ValueError, match="more than 10 rows"):
        read_trace(write_trace(tmp_path / "trace.csv"))


def test_a_trace_may_name_tenants(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(f"tenant,{LENGTHS}\na,1,2\n,3,4\n")
    traffic = read_trace(path, requests=3)
    assert [one.more for one in traffic.arrivals] == [{"tenant": "a"}, {}, {"tenant": "a"}]


def test_a_recording_is_traffic(tmp_path):
    """Lengths as they turned out to be, and beginnings in common, for pages of other sizes too."""
    path = tmp_path / "run"
    engine = fake_engine(vocab_size=50, num_pages=64, max_model_len=64, record=str(path))
    sequences = []
    for i in range(4):
        params = SamplingParams(temperature=0, max_tokens=10, n=1 + i % 2)
        prompt = (*range(1, 17), 20 + i, 7)
        sequences += engine.add(Request(id=str(i), prompt_token_ids=prompt, params=params))
    while engine.has_work:
        engine.step()
    engine.close()
    traffic = read_recording(path)
    assert [one.prompt_len for one in traffic.arrivals] == [18] * 4
    assert [n for one in traffic.arrivals for n in one.new_tokens] == [s.num_output for s in sequences]
    for page_size, num_shared in ((2, 8), (4, 4), (8, 2), (16, 1)):
        first, second = (shared_names(one, traffic, page_size) for one in traffic.arrivals[:2])
        assert first[:num_shared] == second[:num_shared]
        assert not set(first[num_shared:]) & set(second[num_shared:])
    outcome = run_fleet(traffic, CONFIG, CALIBRATION)
    assert sum(outcome.num_tokens) == sum(s.num_output for s in sequences)
    assert outcome.cached_tokens >= 3 * 16


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path) -> list[str]:
    CALIBRATION.save(tmp_path / "calibration.json")
    trace = write_trace(tmp_path / "trace.csv")
    return ["simulate", "--calibration", str(tmp_path / "calibration.json"), "--trace", str(trace), "--json", "-"]


def lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_command_answers(files, capsys):
    assert main([*files, "--rate", "5,50", "--replicas", "1,2"]) == 0
    results = lines(capsys)
    assert [(line["rate"], line["replicas"]) for line in results] == [(5, 1), (5, 2), (50, 1), (50, 2)]
    assert all(line["requests"] == 50 for line in results)
    assert main([*files, "--rate", "100", "--target-first-token", "0.2"]) == 0
    results = lines(capsys)
    assert [line["enough"] for line in results] == [line["first_token_s_p95"] <= 0.2 for line in results]
    assert main([*files, "--sweep", "page_size=2,4,8", "--rate", "20"]) == 0
    assert [line["swept"] for line in lines(capsys)] == ["page_size=2", "page_size=4", "page_size=8"]
    shared = [*files, "--shared-prefix", "16,2", "--replicas", "2", "--sweep", "routing=prefix,turns"]
    assert main(shared) == 0
    assert all(line["cached"] > 0 for line in lines(capsys))


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--sweep", "colour=1"], "sweep="),
        (["--routing", "best"], "routing="),
        (["--recording", "x"], "--trace FILE or --recording FILE"),
        (["--shared-prefix", "16"], "--shared-prefix N,G"),
        (["--shared-prefix", "4000,1"], "shared_prefix="),
        (["--page-size", "0"], "page_size"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(files, flags, match, capsys):
    assert main([*files, *flags]) == 2
    assert match in capsys.readouterr().err


def test_a_chip_is_simulated_by_its_data_sheet(tmp_path, capsys):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    trace = write_trace(tmp_path / "trace.csv")
    command = ["simulate", "--model", str(tmp_path), "--topology", "v5e:1x1", "--trace", str(trace), "--json", "-"]
    waits = []
    for efficiency in ("1", "0.5"):
        assert main([*command, "--efficiency", efficiency, "--num-pages", "256"]) == 0
        captured = capsys.readouterr()
        assert "no measurement" in captured.err
        waits.append(json.loads(captured.out)["first_token_s_p50"])
    assert waits[1] == pytest.approx(2 * waits[0], rel=0.2)


def test_a_pool_smaller_than_the_models_length_is_simulated_up_to_what_it_holds(capsys, tmp_path):
    """Llama-3.1-8B has 131,072 positions, and one v6e beside its weights pages for fewer."""
    config = Path(__file__).parents[1] / "bench" / "configs" / "Llama-3.1-8B.json"
    trace = write_trace(tmp_path / "trace.csv")
    command = ["simulate", "--model", str(config), "--topology", "v6e:1x1", "--trace", str(trace)]
    assert main(command) == 0, capsys.readouterr().err
    assert main([*command, "--max-model-len", "131072"]) == 0, "the pool grows to hold one such sequence"
    command[command.index("v6e:1x1")] = "v5e:1x1"
    assert main([*command, "--max-model-len", "131072"]) == 2
    assert "max_model_len=131072" in capsys.readouterr().err
