import io

import pytest

from midflight.progress import Progress, duration, step_line

RECORD = {
    "step": 3,
    "reward": 0.4123,
    "groups": 8,
    "groups_with_signal": 6,
    "turns": 3.1,
    "tool_error_rate": 0.07,
    "tokens_per_second": 1512.4,
    "drift": 2e-6,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_is_one_line() -> None:
    expected = (
        "step  3/20  reward 0.412  signal 6/8  turns 3.10  tool errors 7.0%  1,512 tok/s  drift 2.0e-06  left 4m 05s"
    )
    assert step_line(RECORD, 20, 245.2) == expected
    stream = io.StringIO()
    Progress(stream).step({**RECORD, "infrastructure": 2}, 20, 245.2)
    assert stream.getvalue() == expected + "  infrastructure failures 2\n"


def test_a_second_line_says_why_trajectories_of_a_step_were_lost() -> None:
    stream = io.StringIO()
    lost = {"trajectories": 8, "infrastructure": 3, "infrastructure_reasons": {"s: down": 2, "s: HTTP 401": 1}}
    Progress(stream).step({**RECORD, **lost}, 20, 8.0)
    assert stream.getvalue().splitlines()[1:] == [
        "3 of 8 trajectories were lost to infrastructure failures, 2 of them so: s: down"
    ]
    Progress(stream).step({**RECORD, **lost, "infrastructure": 0, "infrastructure_reasons": {}}, 20, 8.0)
    assert stream.getvalue().count("\n") == 3


def test_what_a_record_lacks_is_a_dash() -> None:
    assert step_line({"step": 1, "drift": None}, 5, float("inf")) == (
        "step 1/5  reward -  signal -/-  turns -  tool errors -  - tok/s  drift -  left -"
    )


def test_a_step_on_demonstrations_tells_its_loss() -> None:
    record = {"step": 3, "demonstrations": 16, "loss": 0.41204, "trained_tokens": 1312, "grad_norm": 1.2}
    assert step_line(record, 20, 245.2) == (
        "step  3/20  loss 0.4120  demonstrations 16  tokens 1,312  gradient 1.20  left 4m 05s"
    )


def test_a_bar_off_a_terminal_is_at_most_eleven_whole_lines() -> None:
    stream = io.StringIO()
    times = iter([0.0, *(float(second) for second in range(1, 100))])
    with Progress(stream, clock=lambda: next(times)).bar("evaluating before", 240) as bar:
        for _ in range(240):
            bar.advance()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "evaluating before: 24/240 (1s)"
    assert lines[-1] == "evaluating before: 240/240 (10s)"


def test_a_short_bar_and_large_advances() -> None:
    stream = io.StringIO()
    progress = Progress(stream, clock=lambda: 0.0)
    with progress.bar("loading", 3) as bar:
        bar.advance()
        progress.note("cached weights found")
        bar.advance(2)
    assert stream.getvalue() == "loading: 1/3 (0s)\ncached weights found\nloading: 3/3 (0s)\n"


def test_on_a_terminal_bars_are_live_and_notes_go_above_them() -> None:
    stream = Terminal()
    progress = Progress(stream)
    with progress.bar("outer", 2) as outer, progress.bar("inner", 1) as inner:
        inner.advance()
        progress.note("[not markup] \N{CHECK MARK}")
        outer.advance(2)
    progress.step(RECORD, 20, 8.0)
    written = stream.getvalue()
    assert "[not markup] \N{CHECK MARK}\n" in written
    assert "outer" in written and "inner" in written and "2/2" in written
    assert written.endswith("left 8s\n")
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1


def test_an_error_inside_a_bar_gives_the_terminal_back() -> None:
    stream = Terminal()
    with pytest.raises(KeyError), Progress(stream).bar("x", 3):
        raise KeyError
    assert "\x1b[?25h" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (3599.7, "1h 00m"), (7380, "2h 03m"), (-1, "-")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_passing_bar_leaves_nothing_and_is_silent_off_a_terminal() -> None:
    plain = io.StringIO()
    with Progress(plain).bar("step 1/2: rollouts", 4, passing=True) as bar:
        bar.advance(4)
    assert plain.getvalue() == ""
    terminal = Terminal()
    progress = Progress(terminal)
    with progress.bar("step 1/2: rollouts", 4, passing=True) as bar:
        bar.advance(4)
        progress.note("in between")
    assert "step 1/2: rollouts" in terminal.getvalue() and "in between" in terminal.getvalue()
    last = terminal.getvalue().rpartition("\x1b[2K")[2]  # what is drawn after the last line was erased
    assert "rollouts" not in last
