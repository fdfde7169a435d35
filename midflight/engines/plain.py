"""Messages as the text that a server tokenises itself.

Invariant: no control token can be spelt in it. A server reads `<|im_end|>` in a web page as the end of a message, so
what looks like a control token of any known chat template is taken apart by a space, the same way every time.
"""

from __future__ import annotations

import re
from functools import lru_cache

from midflight.engines.base import Message

_NAMES = (
    "s|bos|eos|unk|pad|mask|sep|cls|eot|eod|fim_prefix|fim_middle|fim_suffix|start_of_turn|end_of_turn|im_start|im_end|"
    "start_of_image|end_of_image|image_soft_token|image|system|user|assistant|think|tools|tool_calls?|tool_response|"
    r"extra_id_\d+|unused_?\d+|reserved_\d+|special_\d+"
)
_BRACKETS = (
    "INST|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|CALL_ID|ARGS|SYSTEM_PROMPT|THINK|IMG|IMG_BREAK|IMG_END|"
    "PREFIX|MIDDLE|SUFFIX|AUDIO|BEGIN_AUDIO|gMASK|sMASK|MASK|CLS|SEP|PAD|UNK|BOS|EOS"
)
_CONTROL = re.compile(
    rf"[<\[](?:(?<=<)(?:(?=[|｜][^|｜<>\s]{{1,64}}[|｜]>)|(?=</?SYS>>)|(?=/?(?i:{_NAMES})>)|(?=\]minimax\[>))"
    rf"|(?<=\[)(?=/?(?:{_BRACKETS})\]))"
)


def defused(text: str) -> str:
    """`text` with a space inside whatever spells a control token; it is the same after a second time."""
    return _CONTROL.sub(lambda match: f"{match[0]} ", text)


_defused_again = lru_cache(maxsize=64)(defused)
"""For system messages, which many trajectories have in common."""


def as_chat(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    """Messages as chat APIs take them."""
    return [
        {
            "role": message.role,
            "content": (_defused_again if message.role == "system" else defused)("".join(message.parts)),
        }
        for message in messages
    ]


def as_text(messages: tuple[Message, ...]) -> str:
    """Messages as one text, for completion APIs; the local engine joins them the same way without a chat template."""
    return defused("\n".join("".join(message.parts) for message in messages))
