"""Chunks assigned to workers: each once, in order; any failure ends the job with a message."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import thread_ranks
from checks import Rows, random_mlp, rows
from onchip.errors import DeviceError, InputError, OutputError, RankError
from onchip.formats.arrays.row_files import RowSource
from onchip.plan.kernel import Job
from onchip.plan.plan_json import array_weights, plan_to_json
from onchip.runtime import placement
from onchip.runtime.distributed import follower as follow_file
from onchip.runtime.distributed import leader as leader_file
from onchip.runtime.distributed import recording as recording_file
from onchip.runtime.distributed.follower import follow
from onchip.runtime.distributed.launchers import gpu_rank, launched_as
from onchip.runtime.distributed.leader import RankGroup
from onchip.runtime.distributed.messages import Assignment, ClockAnswer, ClockRequest, End, Orders, Synced
from onchip.runtime.distributed.ranks import OneRank, rank_device, wait_for
from onchip.runtime.distributed.recording import ROUND_TRIPS, Recording
from onchip.runtime.distributed.schedule import ChunkScheduler, Finished
from onchip.runtime.engine import Engine, compile
from onchip.runtime.io.output import ChunkRecord, open_output
from onchip.runtime.io.slices import SliceFile, Slices
from onchip.runtime.io.stream import chunks_of
from onchip.runtime.placement import place
from onchip.runtime.run_job import RunOptions, start_job
from onchip.runtime.spans import Call, Recorder, Span
from thread_ranks import ThreadRanks

NET = random_mlp(20, 16, 3)
X = rows(100, 20)


class Gate(RowSource):
    """Rows in memory; rank 0's engine gets some when all others are ready."""

    def __init__(self, x, said, others):
        super().__init__(x, lambda: None)
        self._said, self._others = said, others

    def read(self, start, stop):
        if threading.current_thread().name == "onchip-engine-0":
            while len(self._said) < self._others:
                time.sleep(0.001)
        return super().read(start, stop)


def run_threads(tmp_path, size, x, batch=7, machines=1, records=False):
    """The job on this many ranks; returns its report, the rank objects and the followers' results."""
    ranks, said, codes = ThreadRanks(size, machines).all, [], {}
    source = Gate(x, said, size - 1)

    def work(rank):
        try:
            codes[rank.rank] = follow(rank)
        except RankError as error:
            codes[rank.rank] = error.what

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks[1:]]
    for thread in threads:
        thread.start()
    try:
        with RankGroup(ranks[0], log=said.append) as group, open_output(tmp_path / "y.npy", NET, 100) as output:
            run_threads.group = group
            how = RunOptions("cpu", threads=1, batch=batch, records=records)
            engines, chunks = start_job(NET, [source], output, Job("fp32", 100), how, ranks[0], group)
            run_threads.own = own = Recorder(engines[0].plan)
            if records:
                engines[0].record(own)
            report = group.run(engines, [source], output, chunks)
    finally:
        for rank, thread in enumerate(threads, 1):
            ranks[0].send(rank, End())  # after a hang: MPI would have ended them
            thread.join()
        run_threads.said, run_threads.ranks, run_threads.codes = said, ranks, codes
    return report


@pytest.mark.parametrize("can_see", [True, False])
def test_ranks_give_the_bits_of_one(tmp_path, monkeypatch, can_see):
    """Rows in memory travel to the other ranks; where they do not see the output, results travel back."""
    monkeypatch.setattr(follow_file, "has_token", lambda slices: can_see)
    x = X.copy()
    x[[3, 50], 0] = np.nan
    np.save(tmp_path / "x.npy", x)
    report = run_threads(tmp_path, 3, x)
    whole = compile(NET, device="cpu", threads=1, batch_hint=100)(x)
    assert np.load(tmp_path / "y.npy").tobytes() == whole.tobytes()
    assert report.first_rows.tobytes() == whole[:5].tobytes()
    assert (report.rows, report.bad_rows, report.first_bad_row) == (100, 2, 3)
    assert run_threads.codes == {1: 0, 2: 0}
    assert [rank.left_with for rank in run_threads.ranks] == [None] * 3
    assert sorted(run_threads.said) == ["rank 1 on host1: cpu, 1 thread", "rank 2 on host2: cpu, 1 thread"]


def test_what_a_rank_fails_with_ends_the_job(tmp_path, monkeypatch):
    def write(self, start, y):
        if threading.current_thread().name == "onchip-engine":  # rank 1's
            raise OutputError("cannot write y", got="No space left on device", hint="free some space")
        return real(self, start, y)

    real = SliceFile.write
    monkeypatch.setattr(SliceFile, "write", write)
    with pytest.raises(OutputError, match=r"cannot write y \(rank 1 on host1\)") as caught:
        run_threads(tmp_path, 2, X, batch=1)
    assert caught.value.hint == "free some space"
    assert run_threads.codes == {1: 0}
    assert run_threads.ranks[0].left_with is None  # all ended in order
    assert not (tmp_path / "y.npy").exists()


@pytest.mark.parametrize(("rank", "thread"), [(0, "onchip-engine-0"), (1, "onchip-engine")])
def test_a_rank_that_hangs_ends_the_job(tmp_path, monkeypatch, rank, thread):
    """Rank 0 notices either rank. The deadline passes when the other rank has done the rest."""
    hangs, go_on = threading.Event(), threading.Event()

    def write(self, start, y):
        if threading.current_thread().name == thread:
            hangs.set()
            go_on.wait()
        return real_write(self, start, y)

    def late(self, deadline_s):
        is_over = hangs.is_set() and not self.left and not self.held(1 - rank)
        found = real_late(self, 0.0) if is_over else None
        if found is not None:
            go_on.set()  # so that its thread ends
        return found

    real_write, real_late = SliceFile.write, ChunkScheduler.late
    monkeypatch.setattr(SliceFile, "write", write)
    monkeypatch.setattr(ChunkScheduler, "late", late)
    with pytest.raises(RankError, match=f"rank {rank} on host{rank} hangs") as caught:
        run_threads(tmp_path, 2, X, batch=1)
    assert caught.value.got.startswith("chunk ")
    assert run_threads.ranks[0].left_with == 1  # a rank that does not answer is killed


def test_rows_and_results_travel_while_a_chunk_is_run(monkeypatch):
    """Only rank 0 has the rows and can write: messages carry both while a rank runs another chunk."""
    at_work, go_on = threading.Event(), threading.Event()

    def call(engine, x, out=None):
        if np.array_equal(x, X[40:80]):
            at_work.set()
            go_on.wait()
        return real(engine, x, out=out)

    real = Engine.__call__
    monkeypatch.setattr(Engine, "__call__", call)
    ranks, chunks = ThreadRanks(2).all, chunks_of((0, 40, 80), 100)
    thread = threading.Thread(target=follow, args=(ranks[1],), daemon=True)
    thread.start()
    plan, _, _ = place(NET, "cpu", Job("fp32", 100), 1)
    slices = Slices("/not/here", 0, (100, 3), "float32", "token")
    ranks[0].broadcast(Orders(plan_to_json(plan), array_weights(plan.network), "cpu", 1, None, slices, 60.0))
    ready = wait_for(ranks[0], None, "")[1]
    assert (ready.can_read, ready.can_write) == (False, False)
    for chunk in chunks[:2]:
        ranks[0].send(1, Assignment(chunk, (X[chunk.start : chunk.stop],)))
    first = wait_for(ranks[0], None, "")[1]  # while the second is delayed
    at_work.wait()
    ranks[0].send(1, Assignment(chunks[2], (X[80:],)))
    while ranks[0].boxes[1].qsize():
        time.sleep(0.001)
    go_on.set()
    told = [first, *(wait_for(ranks[0], None, "")[1] for _ in range(2))]
    assert np.concatenate([each.y for each in told]).tobytes() == compile(NET, device="cpu", threads=1)(X).tobytes()
    ranks[0].send(1, End())
    thread.join()
    assert ranks[1].is_over


def test_only_rank_0_plans(tmp_path, monkeypatch):
    planned = []

    def make_plan(*given):
        planned.append(threading.current_thread())
        return real(*given)

    real = placement.make_plan
    monkeypatch.setattr(placement, "make_plan", make_plan)
    run_threads(tmp_path, 3, X)
    assert planned == [threading.main_thread()]


@pytest.mark.parametrize("meets", [False, True])  # True: rank 0 waits to compute weights with the others
def test_another_kind_of_device_is_refused(meets):
    ranks = ThreadRanks(2).all
    thread = threading.Thread(target=follow, args=(ranks[1],), daemon=True)
    thread.start()
    plan, _, _ = place(NET, "cpu", Job("fp32", 100), 1)
    text = plan_to_json(plan).replace(plan.device.arch, "riscv64, 128-bit vectors")
    ranks[0].broadcast(Orders(text, array_weights(plan.network), "cpu", 1, None, None, 60.0, meets))
    if meets:
        with pytest.raises(DeviceError, match="another kind of device than rank 0's"):
            ranks[0].meet()
    error = wait_for(ranks[0], None, "")[1].error
    assert error.what == "another kind of device than rank 0's"
    assert error.expected.endswith("riscv64, 128-bit vectors")
    ranks[0].send(1, End())
    thread.join()
    assert ranks[1].is_over


def test_a_rank_does_not_wait_for_ever_for_rank_0():
    ranks = ThreadRanks(2).all
    plan, _, _ = place(NET, "cpu", Job("fp32", 100), 1)
    weights = array_weights(plan.network)
    ranks[0].broadcast(Orders(plan_to_json(plan), weights, "cpu", 1, None, None, deadline_s=0.01))
    with pytest.raises(RankError, match="rank 0 on host0 hangs"):
        follow(ranks[1])
    assert ranks[1].left_with == 1


def test_an_error_before_there_are_orders_reaches_the_other_ranks():
    ranks, codes = ThreadRanks(2).all, []
    thread = threading.Thread(target=lambda: codes.append(follow(ranks[1])), daemon=True)
    thread.start()

    def fail():
        with RankGroup(ranks[0]):
            raise InputError("no such file")

    with pytest.raises(InputError, match="no such file"):
        fail()
    thread.join()
    assert codes == [2]


class Broken(Rows):
    def read(self, start, stop):
        raise InputError("the file broke")


def test_several_engines_of_a_process_share_the_chunks(tmp_path):
    """As --gpus does, with CPU engines."""
    engines = [compile(NET, device="cpu", threads=1, batch_hint=100) for _ in range(3)]
    chunks = chunks_of(tuple(range(0, 100, 7)), 100)
    with RankGroup(OneRank()) as group, open_output(tmp_path / "y.npy", NET, 100) as output:
        output.begin("plan", tuple(range(0, 100, 7)))
        report = group.run(engines, [Rows(X)], output, chunks)
    assert np.load(tmp_path / "y.npy").tobytes() == engines[0](X).tobytes()
    assert report.rows == 100

    with RankGroup(OneRank()) as group, pytest.raises(InputError, match="the file broke"):
        group.run(engines, [Broken(X)], None, chunks)


# -- recording ---------------------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch):
    """All messages, with their senders."""
    found, real = [], thread_ranks.Thread.send
    record = lambda rank, to, message: (found.append((rank.rank, message)), real(rank, to, message))  # noqa: E731
    monkeypatch.setattr(thread_ranks.Thread, "send", record)
    return found


def test_every_rank_records_its_calls(tmp_path, sent):
    """On one machine the ranks' clocks are the same: they are not compared."""
    run_threads(tmp_path, 3, X, records=True)
    own = run_threads.own
    found = run_threads.group.recorded(own.plan)
    assert [(chosen, recorder.where) for chosen, recorder in found] == [
        ("cpu", "rank 1 on host1"), ("cpu", "rank 2 on host2"),
    ]  # fmt: skip
    calls = [call for recorder in (own, *(recorder for _, recorder in found)) for call in recorder.calls]
    assert sum(call.count for call in calls) == 15  # the chunks; of short calls, not each is recorded
    assert all(call.spans and call.begin_ns <= call.spans[0].begin_ns < call.end_ns for call in calls)
    assert not any(isinstance(message, ClockRequest) for _, message in sent)


def test_ranks_say_how_they_timed_their_calls(tmp_path, monkeypatch):
    real = Recording.recorded
    monkeypatch.setattr(Recording, "recorded", lambda self: replace(real(self), clock="CUPTI 13.0", lost=2))
    run_threads(tmp_path, 2, X, records=True)
    ((_, recorder),) = run_threads.group.recorded(run_threads.own.plan)
    assert (recorder.clock, recorder.lost) == ("CUPTI 13.0", 2)


def test_nothing_is_recorded_or_sent_without_an_order(tmp_path, sent, monkeypatch):
    recorders, record = [], Engine.record
    monkeypatch.setattr(Engine, "record", lambda *args: (recorders.append(args[1]), record(*args)))
    run_threads(tmp_path, 3, X, machines=3)
    assert set(recorders) == {None}
    assert run_threads.group.recorded(run_threads.own.plan) == []
    assert [message.recorded for _, message in sent if isinstance(message, Synced)] == [None, None]
    assert not any(isinstance(message, ClockRequest) for _, message in sent)


def test_ranks_on_other_machines_compare_their_clocks(tmp_path, sent, monkeypatch):
    ahead_ns = 10**18  # of rank 0, by far more than a job takes
    clock = leader_file.perf_counter_ns
    monkeypatch.setattr(recording_file, "perf_counter_ns", lambda: clock() - ahead_ns)
    run_threads(tmp_path, 3, X, batch=1, machines=3, records=True)
    for _, recorder in run_threads.group.recorded(run_threads.own.plan):
        assert all(call.begin_ns > ahead_ns and call.spans[0].begin_ns > ahead_ns for call in recorder.calls)
    requests = [rank for rank, message in sent if isinstance(message, ClockRequest)]
    answers = [message for _, message in sent if isinstance(message, ClockAnswer)]
    assert {*requests} == {1, 2}
    assert 2 <= len(answers) <= len(requests) <= 2 * ROUND_TRIPS  # the last are not answered after the job
    assert len([message for _, message in sent if isinstance(message, Synced)]) == 2  # a request causes no second Rest


def test_the_shortest_ways_give_the_difference_of_the_clocks(monkeypatch):
    """Rank 0's clock is 1000 ahead; the way there or back takes long in every round trip."""
    now, requests = [0], []
    monkeypatch.setattr(recording_file, "perf_counter_ns", lambda: now[0])
    rank = SimpleNamespace(machine=1, send=lambda to, message: requests.append((to, message.sent_ns)))
    recorders = []
    engine = SimpleNamespace(plan=None, chosen="cpu", record=recorders.append)
    recording = Recording(rank, engine)
    for there, back in [(5, 90), (3, 60), (70, 5), *[(80, 3)] * (ROUND_TRIPS - 3)]:
        to, begin = requests[-1]
        assert (to, begin) == (0, now[0])
        now[0] += there
        answer = ClockAnswer(begin, now[0] + 1000)
        now[0] += back
        recording.on_answer(answer)
    assert len(requests) == ROUND_TRIPS
    (recorder,) = recorders
    recorder.append(Call(10, 20, 7, (Span("thread 0", "k", 0, 12, 18, 7),)))
    recorder.clock, recorder.lost = "CUPTI 13.0", 2
    assert (recording.recorded().clock, recording.recorded().lost) == ("CUPTI 13.0", 2)
    assert recording.recorded().calls == [Call(1010, 1020, 7, (Span("thread 0", "k", 0, 1012, 1018, 7),))]
    assert recording.recorded().chosen == "cpu"


# -- scheduling --------------------------------------------------------------------------------------------


def test_a_dealer_deals_in_order_and_knows_who_is_late():
    now = [0.0]
    chunks = chunks_of((0, 10, 20, 30), 35)
    scheduler = ChunkScheduler(chunks, None, clock=lambda: now[0])
    assert [scheduler.take(1), scheduler.take(2), scheduler.take(1)] == chunks[:3]
    now[0] = 5.0
    scheduler.finish(1, Finished(ChunkRecord(0, 0), 1.0, np.zeros((5, 1), np.float32)))
    assert (scheduler.held(1), scheduler.held(2), scheduler.left, scheduler.rows_done) == (1, 1, 1, 10)
    now[0] = 6.5
    assert scheduler.late(6.0) == (2, chunks[1])  # 1 began its second chunk at 5
    assert scheduler.late(7.0) is None
    assert scheduler.take(0) == chunks[3]
    assert scheduler.take(0) is None
    for worker, number in ((2, 1), (1, 2), (0, 3)):
        assert not scheduler.is_done
        scheduler.finish(worker, Finished(ChunkRecord(number, 0, 2, 10 * number + 1), 2.0, None))
    assert scheduler.is_done
    report = scheduler.report(SimpleNamespace(row_shape=(1,), dtype="float32"))
    assert (report.rows, report.bad_rows, report.first_bad_row, report.engine_seconds) == (35, 6, 11, 3.0)


# -- devices and threads of a rank -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "found"),
    [({}, None), ({"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4)), ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
     ({"PMIX_RANK": "5", "SLURM_NTASKS": "8"}, (5, 8)),
     ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, (0, 2))],
)  # fmt: skip
def test_a_launcher_says_who_a_process_is(env, found):
    assert launched_as(env) == found


@pytest.mark.parametrize(
    ("env", "alone", "together"),
    [({}, 0, 1), ({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, 3, 1), ({"MPI_LOCALRANKID": "2"}, 2, 1),
     ({"SLURM_LOCALID": "5"}, 5, 1), ({"SLURM_LOCALID": "x"}, 0, 1)],
)  # fmt: skip
def test_a_launcher_says_which_gpu_where_mpi_sees_a_machine_in_each_rank(env, alone, together):
    assert gpu_rank(0, 1, env) == alone
    assert gpu_rank(1, 2, env) == together


def test_ranks_of_a_machine_take_its_gpus_in_turn():
    ranks = ThreadRanks(6).all
    assert [rank_device("cuda", rank, 4) for rank in ranks] == [f"cuda:{i}" for i in (0, 1, 2, 3, 0, 1)]
    assert {rank_device("cuda:2", rank, 4) for rank in ranks} == {"cuda:2"}
    assert rank_device("cuda", OneRank(), 4) == "cuda"
