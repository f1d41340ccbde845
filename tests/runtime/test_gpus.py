"""GPUs that several processes of a host see: each is used by one of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.errors import ConfigError
from spmd_lm.runtime.gpus import share, visible_gpus

EIGHT = [f"GPU-{i}" for i in range(8)]


@pytest.mark.parametrize(
    ("seen", "own"),
    [
        ([["a", "b"], ["c", "d"]], [[0, 1], [0, 1]]),  # --gpus-per-task=2: 0,1 in each task's own cgroup
        ([EIGHT, EIGHT], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([EIGHT], [[*range(8)]]),
        ([EIGHT] * 8, [[i] for i in range(8)]),
        ([["a", "b"], ["b", "a"]], [[0], [0]]),  # the same in another order
        ([["a"], ["b"], ["c"]], [[0], [0], [0]]),  # --gpus-per-task=1
        ([["a", "b"], ["c", "d"], ["a", "b"], ["c", "d"]], [[0], [0], [1], [1]]),  # two hosts, cyclic
        ([["MIG-a"], ["MIG-b"]], [[0], [0]]),
        ([[], []], [[], []]),  # CPUs
        ([["a"], []], [[0], []]),
    ],
)
def test_what_the_launcher_gave_is_used_whole(seen, own):
    assert share(seen) == own


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        ([EIGHT] * 3, r"3 processes.* process 0, see the same 8 GPUs.* Start 1, 2, 4 or 8 on a host"),
        ([["a", "b"], ["c"], ["c"]], r"2 processes.* process 1, see the same 1 GPU,.* Start 1 on a host"),
        ([EIGHT[:6]] * 12, "Start 1, 2, 3 or 6 on a host"),
        ([["a", "b"], ["b", "c"]], "processes 0 and 1 see 2 and 2 GPUs, of which 1 are the same"),
        ([EIGHT, EIGHT[:4]], "processes 0 and 1 see 8 and 4 GPUs, of which 4 are the same"),
    ],
)
def test_what_would_leave_a_gpu_idle_is_refused(seen, problem):
    with pytest.raises(ConfigError, match=problem):
        share(seen)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=4).flatmap(
        lambda hosts: st.tuples(
            st.just(hosts), st.permutations([h for h, (_, tasks) in enumerate(hosts) for _ in range(tasks)])
        )
    )
)
def test_every_gpu_is_used_once_or_all_is_refused(job):
    """Tasks of hosts, in any order; all tasks of a host see its GPUs."""
    hosts, tasks = job
    seen = [[f"{host}-{i}" for i in range(hosts[host][0])] for host in tasks]
    even = all(gpus % processes == 0 for gpus, processes in hosts)
    if not even:
        with pytest.raises(ConfigError, match="cannot share them evenly"):
            share(seen)
        return
    used = sorted(gpus[i] for gpus, own in zip(seen, share(seen), strict=True) for i in own)
    assert used == sorted({gpu for gpus in seen for gpu in gpus})


@pytest.mark.gpu
def test_cuda_names_the_gpus(monkeypatch):
    import jax

    assert len({*visible_gpus()}) == jax.local_device_count()
