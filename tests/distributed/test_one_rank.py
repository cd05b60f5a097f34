"""A world of one: every collective means that one gets back what one gave."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from crius.launch.local import run_workers
from crius.parallel.runtime import world

GIVEN = [3.0, -1.0, 2.5, 0.0]


def in_place(collective):
    values = torch.tensor(GIVEN)
    collective(values)
    return values.tolist()


def into(collective):
    result = torch.full((len(GIVEN),), 9.0)
    collective(result, torch.tensor(GIVEN))
    return result.tolist()


def objects(collective):
    result = [None]
    collective(result, GIVEN)
    return result[0]


def broadcast_object(result, given):
    result[:] = [given]
    dist.broadcast_object_list(result, src=0)


COLLECTIVES = {
    "all_reduce": lambda: in_place(dist.all_reduce),
    "all_reduce_max": lambda: in_place(lambda values: dist.all_reduce(values, dist.ReduceOp.MAX)),
    "reduce": lambda: in_place(lambda values: dist.reduce(values, 0)),
    "broadcast": lambda: in_place(lambda values: dist.broadcast(values, 0)),
    "all_gather": lambda: into(lambda result, given: dist.all_gather([result], given)),
    "all_gather_into_tensor": lambda: into(dist.all_gather_into_tensor),
    "gather": lambda: into(lambda result, given: dist.gather(given, [result], 0)),
    "scatter": lambda: into(lambda result, given: dist.scatter(result, [given], 0)),
    "reduce_scatter": lambda: into(lambda result, given: dist.reduce_scatter(result, [given])),
    "reduce_scatter_tensor": lambda: into(dist.reduce_scatter_tensor),
    "all_to_all": lambda: into(lambda result, given: dist.all_to_all([result], [given])),
    "all_to_all_single": lambda: into(dist.all_to_all_single),
    "all_to_all_single_split": lambda: into(lambda result, given: dist.all_to_all_single(result, given, [4], [4])),
    "all_gather_object": lambda: objects(dist.all_gather_object),
    "gather_object": lambda: objects(lambda result, given: dist.gather_object(given, result, 0)),
    "scatter_object_list": lambda: objects(lambda result, given: dist.scatter_object_list(result, [given], 0)),
    "broadcast_object_list": lambda: objects(broadcast_object),
}


def thread_names():
    return [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def write_results(place):
    torch.set_num_threads(1)
    with world(place.rank, place.world_size, torch.device("cpu"), "", 60) as ranks:
        found = {name: collective() for name, collective in COLLECTIVES.items() if not no_such(name)}
        found["World.sum"] = ranks.sum(torch.tensor(GIVEN)).tolist()
        found["World.gather"] = ranks.gather(torch.tensor(GIVEN))[0].tolist()
        found["World.gather_json"] = ranks.gather_json(GIVEN)[0]
        dist.barrier()
        threads = thread_names() if sys.platform == "linux" else []
        (place.log_dir / "results.json").write_text(json.dumps({"found": found, "threads": threads}))


def no_such(name):
    """Gloo lacks some of them before torch 2.13."""
    return dist.get_backend() == dist.Backend.GLOO and name.startswith(("all_to_all", "reduce_scatter"))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    assert run_workers(write_results, 1, folder) == 0
    return json.loads((folder / "logs" / "results.json").read_text())


def test_one_rank_gets_back_what_it_gave(results):
    assert {name: values for name, values in results["found"].items() if values != GIVEN} == {}
    assert len(results["found"]) > 12


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Gloo is taken")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_rank_has_no_thread_that_waits_for_words_of_others(results):
    assert [name for name in results["threads"] if "gloo" in name] == []
