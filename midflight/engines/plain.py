"""Messages as the text that a server tokenises itself.

Invariant: no control token can be spelt in it. A server reads `<|im_end|>` in a web page as the end of a message, so
what has the shape of a control token is taken apart by a space, the same way every time. The shape is a name in angle
brackets, with bars or without, or a word in capitals between `>>` and `<<`: it need not be known, but HTML tags, types
and single letters stay as they are. In square brackets it is a name with bars, or capitals joined by underscores; of
other words, which may as well be an index or a note, those that models have.
"""

from __future__ import annotations

import re
from functools import lru_cache

from midflight.engines.base import Message

_TEXT = (
    "abbr|address|area|article|aside|base|bdi|bdo|big|blockquote|body|br|button|canvas|caption|center|cite|code|col|"
    "colgroup|data|datalist|dd|del|details|dfn|dialog|div|dl|dt|em|embed|fieldset|figcaption|figure|font|footer|form|"
    "frame|h[1-6]|head|header|hgroup|hr|html|iframe|input|ins|kbd|label|legend|li|link|main|map|mark|menu|meta|meter|"
    "nav|noscript|ol|optgroup|option|output|param|picture|pre|progress|ruby|rp|rt|samp|script|search|section|select|"
    "slot|small|span|strike|strong|style|sub|summary|sup|svg|table|tbody|td|template|textarea|tfoot|th|thead|time|"
    "title|tr|track|tt|ul|var|wbr|"
    r"any|bool|boolean|byte|char|double|float|int|integer|long|number|short|str|string|void|[iuf]\d{1,3}|[iu]size|"
    r"[a-rt-z]|\d{1,64}|\w{1,64}(?:::\w{1,64}){1,8}"
)
"""What may stand in angle brackets: tags of HTML (but those that some model has as a token, `s`, `image`, `audio`,
`video`, `img`, `object`, `source`; `PRE` in capitals is one too), types, letters, numbers, names of C++."""
_BRACKETS = (
    r"[A-Z]+(?:_[A-Z\d]+)+|INST|ARGS|THINK|IMG|REF|PREFIX|MIDDLE|SUFFIX|AUDIO|TRANSCRIBE|[gs]?MASK|CLS|SEP|UNK|"
    r"PAD\d{0,7}|[BE]O[DMST]|@[A-Z]+@|(?:start|end)_header_id|(?:control_|extra_id_|unused_?)\d{1,7}|multimodal"
)
"""In square brackets: of Mistral, Kimi, Gemma, GLM, BERT and those that take after them."""
_CONTROL = re.compile(  # each run is bounded: the time is linear whatever the text
    rf"<(?=[|｜][^<>\s]{{1,64}}>|[^<>\s]{{1,64}}[|｜]>|\]\w{{1,64}}\[>"
    rf"|PRE>|(?!/?(?i:{_TEXT})/?>)/?[\w:.|-]{{0,63}}[^\W\d_][\w:.|-]{{0,63}}/?>)"
    rf"|\[(?=[|｜][^\[\]\s]{{1,64}}[|｜]\]|/?(?:{_BRACKETS})\]|e~\[)"
    r"|\](?=~!?b[\[\]])|>(?=>[A-Z][A-Z0-9_]{2,63}<<)"
)


def defused(text: str) -> str:
    """`text` with a space inside whatever spells a control token; it is the same after a second time."""
    if "<" not in text and "[" not in text and "]" not in text:  # each of them has one
        return text
    return _CONTROL.sub(lambda match: f"{match[0]} ", text)


def as_chat(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    """Messages as chat APIs take them."""
    return [
        {
            "role": message.role,
            "content": _system(message.parts) if message.role == "system" else defused("".join(message.parts)),
        }
        for message in messages
    ]


@lru_cache(maxsize=64)
def _system(parts: tuple[str, ...]) -> str:
    """Of a system message, which many trajectories have in common: the same parts, so that none is read again."""
    return defused("".join(parts))


def as_text(messages: tuple[Message, ...]) -> str:
    """Messages as one text, for completion APIs; the local engine joins them the same way without a chat template."""
    return defused("\n".join("".join(message.parts) for message in messages))
