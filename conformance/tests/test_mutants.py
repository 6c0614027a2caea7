"""Negative controls: every mutant fits the implementation, is found, and is taken back. Functions that begin with
`job` run in workers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hpcompat_conformance import spec
from hpcompat_conformance.adapters.hpcompat_torch import ADAPTER, load
from hpcompat_conformance.case import Case, all_cases
from hpcompat_conformance.cli import main
from hpcompat_conformance.context import current
from hpcompat_conformance.mutants import run, show
from hpcompat_conformance.mutants.plant import Mutant, Plant, StaleMutant, all_mutants, mutant, planted
from hpcompat_conformance.mutants.run import MutantPlan, MutantRun, Verdict, against, in_order, must_pass
from hpcompat_conformance.pool import PoolSet
from hpcompat_conformance.recipes import Chain
from hpcompat_conformance.run_context import Context
from hpcompat_conformance.training import trained

pytest.importorskip("torch")

MUST_PASS = must_pass(all_cases())
QUICK = [case for case in MUST_PASS if case.id == "reduce.the_mean_whatever_the_mesh"]
RESET = "hpcompat.core.param_group:ParamGroup.reset_iter_state"
POST_BACKWARD = "hpcompat.core.param_group:ParamGroup.post_backward"


class Quiet:
    """A listener that does nothing."""

    def started(self, mutant: Mutant, case: Case, *, procs: int) -> None: ...

    def finished(self, verdict: Verdict) -> None: ...


class TargetNotes(Plant):
    """A plant that notes what it replaces."""

    def __init__(self) -> None:
        super().__init__(file="")
        self.targets: list[str] = []

    def around(self, target: str, stand_in: Callable[..., Any]) -> None:
        self.targets.append(target)
        super().around(target, stand_in)


def found(target: str) -> Any:
    """What is at a target now."""
    module, _, path = target.partition(":")
    value: Any = importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value


def judged(mutants: list[Mutant], cases: list[Case], pools: PoolSet, **options: Any) -> dict[str, Verdict]:
    """The verdict on each mutant, by name."""
    plan = MutantPlan(ADAPTER, mutants, cases, **{"procs": (2,), **options})
    with MutantRun(plan, pools=pools) as mutant_run:
        return {verdict.mutant.name: verdict for verdict in mutant_run.verdicts(Quiet())}


@mutant()
def there_is_no_such_function(plant: Plant) -> None:
    """Stale."""
    plant.instead("hpcompat.core.param_group:ParamGroup.no_such_method")


@mutant()
def its_own_code_fails(plant: Plant) -> None:
    """Stale in what it uses."""
    plant.after(POST_BACKWARD, lambda group: group.no_such_attribute)


@mutant()
def nobody_calls_it(plant: Plant) -> None:
    """Not met by a case that resets nothing."""
    plant.instead(RESET)


@mutant()
def harmless(plant: Plant) -> None:
    """No bug at all."""
    plant.after(POST_BACKWARD, lambda group: None)


@mutant()
def one_rank_dies(plant: Plant) -> None:
    """The last rank is gone in the middle of a backward."""

    def leave(group: Any) -> None:
        import os

        if current().rank == current().world_size - 1:
            os._exit(3)

    plant.before(POST_BACKWARD, leave)


@mutant()
def backward_hangs(plant: Plant) -> None:
    """No rank comes back from backward."""

    def hang(group: Any) -> None:
        import threading

        threading.Event().wait()

    plant.before(POST_BACKWARD, hang)


@pytest.fixture(scope="module")
def verdicts(pool: PoolSet) -> dict[str, Verdict]:
    """Of the mutants above, all in one set of processes."""
    mutants = [there_is_no_such_function, its_own_code_fails, nobody_calls_it, harmless, one_rank_dies]
    return judged([*mutants, harmless_again], QUICK, pool)


@mutant()
def harmless_again(plant: Plant) -> None:
    """No bug at all, after one that has ended a process."""
    plant.after(POST_BACKWARD, lambda group: None)


def test_there_are_enough() -> None:
    assert len(all_mutants()) >= 30


@pytest.mark.parametrize("one", all_mutants(), ids=lambda one: one.name)
def test_it_is_planted_and_taken_back(one: Mutant) -> None:
    with planted(one):
        pass
    plant = TargetNotes()
    originals = {}
    one.apply(plant)
    planted_now = {target: found(target) for target in plant.targets}
    plant.take_back()
    assert plant.targets
    for target, stand_in in planted_now.items():
        originals[target] = found(target)
        assert stand_in is not originals[target]
        assert stand_in.__wrapped__ is not stand_in
    with planted(one):
        assert all(found(target) is not original for target, original in originals.items())
    assert all(found(target) is original for target, original in originals.items())


@pytest.mark.parametrize("one", all_mutants(), ids=lambda one: one.name)
def test_it_says_what_it_breaks_and_what_finds_it(one: Mutant) -> None:
    assert one.breaks
    assert "\n" not in one.breaks
    names = {name for case in all_cases() for name in (case.id, case.clause)}
    assert one.likely
    assert set(one.likely) <= names


def test_every_mutant_is_met_and_found_by_what_is_likely_to(pool: PoolSet) -> None:
    # Killed means: a case failed after it had called what stands in, and passes without the mutant.
    plan = MutantPlan(ADAPTER, all_mutants(), all_cases(), procs=(2, 4))
    survivors = []
    with MutantRun(plan, pools=pool) as mutant_run:
        for one in all_mutants():
            likely = [case for case in plan.cases if case.clause in one.likely or case.id in one.likely]
            verdict = mutant_run.judge(one, in_order(one, likely, procs=plan.procs), Quiet())
            if verdict.result != "killed":
                survivors.append(f"{one.name}: {verdict.result} {verdict.message}")
    assert not survivors, "\n".join(survivors)


def job_bits() -> dict[str, bytes]:
    ctx = Context(load(), rank=current().rank, world_size=current().world_size, seed=7)
    model = ctx.shard(ctx.model(Chain(own=True)), units=("layers.0", "layers.1"))
    return {name: value.tobytes() for name, value in trained(ctx, model, Chain(own=True)).items()}


def job_bits_with_mutants(names: list[str]) -> list[bool]:
    """Whether each changes the bits."""
    clean = job_bits()
    changed = []
    for one in all_mutants():
        if one.name in names:
            with planted(one):
                changed.append(job_bits() != clean)
    assert job_bits() == clean
    return changed


def test_bits_are_clean_afterwards(pool: PoolSet) -> None:
    before = pool(2).run(job_bits)
    names = ["one-ulp", "sum-instead-of-mean", "stale-weights-after-a-step"]
    changed = pool(2).run(job_bits_with_mutants, names=names)
    assert all(any(rank[index] for rank in changed) for index in range(len(names)))
    assert pool(2).run(job_bits) == before


def test_what_fits_no_more_is_an_error(verdicts: dict[str, Verdict]) -> None:
    stale = verdicts["there-is-no-such-function"]
    assert (stale.result, "no_such_method" in stale.message) == ("error", True)
    broken = verdicts["its-own-code-fails"]
    assert (broken.result, "no_such_attribute" in broken.message) == ("error", True)
    assert not show.is_enough([stale])


def test_what_nobody_met_is_told_from_what_survived(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["nobody-calls-it"].result == "unmet"
    assert verdicts["harmless"].result == "survived"
    assert verdicts["harmless"].num_runs == 1


def test_a_death_is_a_kill_and_new_processes_are_clean(verdicts: dict[str, Verdict]) -> None:
    dead = verdicts["one-rank-dies"]
    assert (dead.result, dead.how, dead.case, dead.procs) == ("killed", "died", QUICK[0].id, 2)
    assert verdicts["harmless-again"].result == "survived"


def test_a_hang_is_a_kill(pool: PoolSet, monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow this machine is at the moment.
    monkeypatch.setattr(run, "LONGEST_PART", 1.0)
    verdict = judged([backward_hangs], QUICK, pool, procs=(1,), timeout=5.0)["backward-hangs"]
    assert (verdict.result, verdict.how) == ("killed", "timeout")


def test_a_timeout_on_a_slow_machine_proves_nothing(pool: PoolSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LONGEST_PART", 0.0)
    verdict = judged([backward_hangs], QUICK, pool, procs=(1,), timeout=5.0)["backward-hangs"]
    assert (verdict.result, "expected the case to be quick" in verdict.message) == ("error", True)


def test_nothing_is_planted_where_nothing_is() -> None:
    with (
        pytest.raises(StaleMutant, match="there-is-no-such-function: expected to find"),
        planted(there_is_no_such_function),
    ):
        pass


def test_likely_killers_come_first_and_one_process_last() -> None:
    one = Mutant("m", "breaks", ("RED-02", "ACC-01"), lambda plant: None)
    order = in_order(one, MUST_PASS, procs=(1, 2, 4))
    clauses = [case.clause for case, _ in order]
    num_first = sum(clause in one.likely for clause in clauses)
    assert clauses[:num_first] == sorted(clauses[:num_first], key=one.likely.index)
    procs = [number for _, number in order[num_first:]]
    assert procs == sorted(procs, key=(2, 4, 1).index)
    assert len(order) == sum(len({1, 2, 4} & set(case.procs)) for case in MUST_PASS)


def test_only_must_clauses_count_and_what_a_mutant_names() -> None:
    assert {spec.clauses()[case.clause].level for case in MUST_PASS} == {"must"}
    one = Mutant("m", "breaks", ("RED-05", "RED-01"), lambda plant: None)
    others = {case.clause for case in against(one, all_cases())} - {case.clause for case in MUST_PASS}
    assert others == {"RED-05"}


def verdict_of(result: str) -> Verdict:
    return Verdict(Mutant(result, "b", (), lambda plant: None), result)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (["killed"] * 20, True),
        (["killed"] * 19 + ["survived"], True),
        (["killed"] * 18 + ["survived"], False),
        (["killed"] * 50 + ["error"], False),
        (["killed"] * 50 + ["unmet"], False),
        ([], False),
    ],
)
def test_how_many_must_be_killed(results: list[str], expected: bool) -> None:
    assert show.is_enough([verdict_of(result) for result in results]) is expected


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "200")
    return


@pytest.mark.usefixtures("wide")
def test_the_command_prints_and_writes_the_kill_table(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    path = tmp_path / "mutants.json"
    assert main(["--mutants", "^(one-ulp|wrong-divide-on-hsdp)$", "--procs", "2", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 mutants killed (100.0 %)" in shown
    assert "reduce.the_mean_over_the_ranks on 2" in shown
    content = json.loads(path.read_text())
    assert (content["killed"], content["total"], content["rate"]) == (2, 2, 1.0)
    kills = {(one["name"], one["case"], one["clause"], one["procs"], one["how"]) for one in content["mutants"]}
    assert ("one-ulp", "reduce.the_mean_over_the_ranks", "RED-01", 2, "fail") in kills


@pytest.mark.usefixtures("wide")
def test_survivors_fail_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    # Nothing is accumulated in this case.
    only = r"reduce\.the_mean_whatever_the_mesh"
    assert main(["--mutants", "^ignore-requires-gradient-sync$", "--procs", "1", "--only", only]) == 1
    assert "unmet: ignore-requires-gradient-sync" in capsys.readouterr().out


@pytest.mark.usefixtures("wide")
def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mutants", "--list"]) == 0
    assert "count-a-norm-twice" in capsys.readouterr().out
    assert main(["--mutants", "no_such_mutant"]) == 2
    assert "matches none" in capsys.readouterr().err
