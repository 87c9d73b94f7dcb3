"""Memory is used again when nobody can see it any more, and never before."""

import threading

import torch

from attngeo.data.recycling import KEPT, Recycled


def test_memory_comes_back_when_the_last_view_is_gone():
    memory = Recycled()
    batch = memory.empty((3, 5, 7))
    place = batch.data_ptr()
    assert batch.is_contiguous()
    assert batch.dtype == torch.float32
    views = [batch[1:], batch.permute(2, 0, 1).unbind(0)[1], batch.numpy()[2], batch.detach()]
    del batch
    while views:
        other = memory.empty((3, 5, 7))
        assert other.data_ptr() != place
        views.pop()
    del other
    pointers = {memory.empty((3, 5, 7)).data_ptr() for _ in range(4)}
    assert place in pointers


def test_what_is_kept_is_never_overwritten():
    memory = Recycled()
    kept = [memory.empty((11, 13)).fill_(number) for number in range(9)]
    assert len({batch.data_ptr() for batch in kept}) == 9
    del kept[::2]
    new = [memory.empty((11, 13)).fill_(-1) for _ in range(9)]
    assert [int(batch.unique()) for batch in kept] == [1, 3, 5, 7]
    assert all(int(batch.unique()) == -1 for batch in new)


def test_little_is_kept_and_other_shapes_are_let_go():
    memory = Recycled()
    batches = [memory.empty((4, 4)) for _ in range(KEPT + 3)]
    batches.clear()
    assert len(memory._free) == KEPT
    assert memory.empty((5, 4)).shape == (5, 4)
    assert [free.shape for free in memory._free] == [(5, 4)]


def test_a_gradient_keeps_the_memory_and_another_thread_may_let_it_go():
    memory = Recycled()
    batch = memory.empty((3,)).fill_(2.0)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * batch).sum()
    del batch
    memory.empty((3,)).fill_(9.0)
    loss.backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
    held = [memory.empty((3,))]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert memory._free
