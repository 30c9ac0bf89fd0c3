"""A model that is sent to a spawned process."""

from __future__ import annotations


def assert_arrives(context, run_there, model, expected) -> None:
    """As an argument of the process, and through a queue.

    Args:
        context: "spawn", of multiprocessing or of torch.multiprocessing.
        run_there: called in the process with two queues and the model; answers for it, and for the one in the first
            queue, with a message in the second.
        model: the model.
        expected: each of the two messages.
    """
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=run_there, args=(inbox, outbox, model))
    process.start()
    try:
        inbox.put(model)
        for _ in range(2):
            assert outbox.get(timeout=120) == expected
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
