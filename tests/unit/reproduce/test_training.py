import msgspec

from gossipdp.reproduce.training import QUICK, TrainingJob, measure_run

LONGER = msgspec.structs.replace(QUICK, noise_steps=150.0, total_steps=320)


def noise(method: str, rate: float) -> float:
    job = TrainingJob(LONGER, "noise", "ring", 16, method, rate, seed=0)
    return measure_run(job).late_distance


def test_the_distance_is_that_of_the_method_and_the_rate():
    plain, doubled, accelerated = noise("gossip", 1.0), noise("gossip", 2.0), noise("a2cid2", 1.0)
    assert doubled < 0.75 * plain
    assert accelerated < 0.75 * plain


def digits(data: str, method: str):
    return measure_run(TrainingJob(LONGER, data, "ring", 8, method, 1.0, seed=0))


def test_digits_are_learnt_and_uneven_classes_keep_workers_apart():
    alike, uneven = digits("iid", "gossip"), digits("dirichlet", "gossip")
    assert alike.loss < 1.5  # of ln 10 at the start
    assert uneven.late_distance > 2 * alike.late_distance
    assert digits("iid", "allreduce").late_distance < 1e-9 * alike.late_distance


def test_the_learning_rate_is_proportional_to_the_workers():
    rates = [
        TrainingJob(QUICK, "iid", "ring", n, "gossip", 1.0, 0).optimizer.learning_rate
        for n in (4, 8)
    ]
    assert rates == [0.1, 0.2]
