"""Who owns what: capsules are used once, tensors given back once, memory does not grow, threads and forks work."""

import gc
import resource
import subprocess
import sys
import threading

import flashcore
import numpy as np
from harness import ALL, NUMPY, cases, check_close, normal, raises, reference
from producer import Producer

VALUES = normal(1, 2, 6, 8)

KINDS = {
    "before 1.0": ({}, b"used_dltensor"),
    "before max_version": ({"old": True}, b"used_dltensor"),
    "1.0": ({"version": (1, 0)}, b"used_dltensor_versioned"),
    "1.9": ({"version": (1, 9)}, b"used_dltensor_versioned"),
    "read-only": ({"version": (1, 1), "flags": 1}, b"used_dltensor_versioned"),
    "no strides": ({"strides": False}, b"used_dltensor"),
    "byte offset": ({"offset": 64}, b"used_dltensor"),
    "pinned": ({"device": (3, 0)}, b"used_dltensor"),
}


@cases(kind=list(KINDS))
def test_tensors_are_given_back_once(kind):
    options, used = KINDS[kind]
    producers = [Producer(VALUES, **options) for _ in range(3)]
    out = flashcore.attention(*producers, out=np.empty_like(VALUES))
    check_close(NUMPY.read(out), reference(VALUES, VALUES, VALUES)[0], "float32")
    for producer in producers:
        assert (producer.exported, producer.deleted) == (1, 1)
        assert producer.names() == {used}


def test_a_tensor_without_deleter_is_left_alone():
    producer = Producer(VALUES, deleter=False)
    flashcore.attention(producer, VALUES, VALUES, out=np.empty_like(VALUES))
    assert (producer.exported, producer.deleted) == (1, 0)


def test_tensors_are_given_back_when_the_call_fails():
    good, unknown = Producer(VALUES), Producer(VALUES, version=(2, 0))
    with raises(BufferError, "DLPack 2.0 is not supported"):
        flashcore.attention(good, unknown, VALUES, out=np.empty_like(VALUES))
    with raises(ValueError, "dim 4 but 8"):
        flashcore.attention(good, VALUES[..., :4], VALUES, out=np.empty_like(VALUES))
    assert (good.exported, good.deleted) == (2, 2)
    assert (unknown.exported, unknown.deleted) == (1, 1)


def test_a_capsule_is_used_once():
    from flashcore import _native

    options, out = _native.Options("bhsd"), np.empty_like(VALUES)
    capsule = VALUES.__dlpack__()
    _native.forward(capsule, VALUES, VALUES, out, None, options)
    with raises(BufferError, "already used"):
        _native.forward(capsule, VALUES, VALUES, out, None, options)


def test_nothing_is_left_after_ten_thousand_calls():
    producer = Producer(VALUES, version=(1, 0))
    out = np.empty_like(VALUES)
    for n in range(10_000):
        flashcore.attention(producer, producer, producer, out=out, scale=1.0 + n % 7)
        producer.capsules.clear()
    assert producer.exported == producer.deleted == 30_000
    assert not producer.alive


@cases(framework=ALL)
def test_memory_does_not_grow(framework):
    framework.need()
    q = framework.make(normal(2, 2, 64, 64), framework.dtypes[-1])

    def rounds(count):
        for n in range(count):
            flashcore.attention(q, q, q, causal=n % 2 == 0, return_lse=n % 3 == 0)
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = rounds(500)
    grown = rounds(3_000) - before
    assert grown < 20_000, f"{grown} KiB more after 3,000 calls"


def test_the_result_outlives_its_inputs():
    out = flashcore.attention(*[VALUES.copy() for _ in range(3)])
    gc.collect()
    check_close(NUMPY.read(out), reference(VALUES, VALUES, VALUES)[0], "float32")


@cases(framework=ALL)
def test_threads(framework):
    framework.need()
    dtype = framework.dtypes[-1]
    wrong = []

    def work(seed):
        q = framework.make(normal(1, 2, 40 + seed, 32, seed=seed), dtype)
        exact = framework.read(q)
        expected, _ = reference(exact, exact, exact)
        for _ in range(20):
            try:
                check_close(framework.read(flashcore.attention(q, q, q)), expected, dtype)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_other_threads_run_meanwhile():
    """The interpreter is free while the CPU computes."""
    q = normal(1, 8, 3000, 64)
    steps, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            steps[0] += 1
            stop.wait(0.0005)

    counter = threading.Thread(target=count)
    counter.start()
    before = steps[0]
    flashcore.attention(q, q, q)
    during = steps[0] - before
    stop.set()
    counter.join()
    assert during >= 5, f"another thread made {during} steps during the call"


FORKS = """
import multiprocessing, numpy, flashcore
q = numpy.random.default_rng(0).standard_normal((2, 4, 300, 64), "float32")
expected = flashcore.attention(q, q, q)              # the parent's threads are running now
context = multiprocessing.get_context("fork")
def child(pipe):
    pipe.send((flashcore.attention(q, q, q) == expected).all())
for _ in range(3):
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,))
    process.start()
    assert ours.poll(60), "the forked child hangs"
    assert ours.recv(), "the forked child computes something else"
    process.join()
    assert process.exitcode == 0
print("all children computed")
"""


def test_forked_children_compute():
    # In a process of its own: frameworks that other tests imported do not survive forks.
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "all children computed", done.stderr
