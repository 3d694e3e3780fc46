"""TensorBoard shows each step once, and texts exactly as they are."""

import re
from html import unescape

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.hparams import plugin_data_pb2

from mmldlm.telemetry.tensorboard import TensorBoard, markdown_table

NASTY = [
    "a | b || c",
    "`code` ``` fence",
    "<script>alert(1)</script> <b>bold</b> &lt; &amp;",
    "line one\nline two\r\nline three",
    "*em* _em_ **strong** [link](http://x) ![i](y) # head",
    "1. item\\| - x",
    "tab\there \x00\x1b[31m \ud800 end",
    "Zürich 東京 🙂",
    "",
]


def write(folder, first, last, purge_step):
    board = TensorBoard(folder, purge_step)
    board.layout()
    for step in range(first, last + 1):
        board.scalars(step, {"loss/total": float(step), "optim/lr": 0.1})
        board.samples(step, [{"reference": "r", "generated": f"from {first} at {step}"}], "samples/l2t")
    board.close()


@pytest.mark.parametrize("reader", [EventAccumulator, PluginAccumulator])
def test_a_resumed_run_shows_each_step_once(tmp_path, reader):
    write(tmp_path, 1, 9, 0)
    write(tmp_path, 7, 12, 7)  # resumed after step 6
    write(tmp_path, 9, 14, 9)  # and again after step 8
    events = reader(str(tmp_path), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    if reader is EventAccumulator:  # the public one, which never purges texts
        assert [(event.step, event.value) for event in events.Scalars("loss/total")] == [(s, s) for s in range(1, 15)]
        return
    assert [event.step for event in events.Tensors("loss/total")] == list(range(1, 15))  # TensorBoard's own
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/l2t/text_summary")]
    result = [re.search(r"from (\d+) at (\d+)", text).groups() for text in texts]
    assert result == [(str(1 if s < 7 else 7 if s < 9 else 9), str(s)) for s in range(1, 15)]


@pytest.mark.quick
def test_texts_show_exactly_as_they_are():
    html = markdown_to_safe_html(markdown_table([{"reference|": text, "generated": text} for text in NASTY]))
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    assert len(rows) == 1 + len(NASTY)
    for text, row in zip(NASTY, rows[1:], strict=True):
        cells = re.findall(r"<td>(.*?)</td>", row, re.DOTALL)
        assert len(cells) == 2 and cells[0] == cells[1]
        assert set(re.findall(r"</?(\w+)", cells[0])) <= {"br"}, "no tag but our line ends"
        shown = unescape(re.sub(r"<br\s*/?>", "\n", cells[0]))
        assert shown == re.sub("[\x00\x1b\ud800]", "\ufffd", text.replace("\r\n", "\n"))


def test_hparams_with_lists_and_none_go_into_the_main_run(tmp_path):
    board = TensorBoard(tmp_path, 0)
    config = {"optim": {"lr": 1e-4, "betas": [0.9, 0.99], "clip": None, "fused": True}, "mode": "joint", "empty": {}}
    board.hparams(config, ["loss/total"])
    board.session_text("run/config", "a: `x`\n```\n<b>\x00")
    board.scalars(1, {"loss/total": float("nan")})
    board.close()
    assert [path.is_file() for path in tmp_path.iterdir()] == [True], "no sub-runs"
    events = EventAccumulator(str(tmp_path)).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["optim.lr"].number_value == 1e-4 and values["mode"].string_value == "joint"
    assert values["optim.betas"].string_value == "[0.9, 0.99]" and values["optim.clip"].string_value == "null"
    assert values["optim.fused"].string_value == "true" and values["empty"].string_value == "{}"
    markdown = events.Tensors("run/config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert re.fullmatch(
        r"<pre><code>a: `x`\n```\n&lt;b&gt;\ufffd\n</code></pre>", markdown_to_safe_html(markdown).strip()
    )
    assert "custom_scalars__config__" not in events.Tags()["tensors"]
