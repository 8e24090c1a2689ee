"""hpcdl/metric_lines.py: whole lines are read one by one, others are left out and counted."""

from hpcdl.metric_lines import MetricLines, is_evaluation


def test_whole_lines_are_read_and_others_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step"\n[2]\n{"loss": 1}\n{"step": NaN}\n{"step": "3"}\n{"step": 2}\n{"step": 3')
    lines = MetricLines(path)
    assert [line["step"] for line in lines] == [1, 2]
    assert lines.broken == 5
    assert path.read_bytes()[lines.place :] == b'{"step": 3'


def test_numbers_beyond_all_floats_are_missing(tmp_path):
    huge = "1" + "0" * 400
    path = tmp_path / "metrics.jsonl"
    texts = [f'{{"step": {huge}}}', f'{{"step": 1, "train_loss": -{huge}}}', '{"step": 1e300}', '{"step": 2}']
    path.write_text("\n".join(texts) + "\n")
    lines = MetricLines(path)
    assert [*lines] == [{"step": 1}, {"step": 2}] and lines.broken == 2


def test_an_evaluation_is_told_from_a_step():
    step = {"step": 1, "epoch": 0.1, "train_loss": 2.0, "seconds": 0.1}
    assert not is_evaluation(step)
    assert is_evaluation(step | {"test_loss": 1.0}) and is_evaluation(step | {"bytes": None, "messages": 3})
