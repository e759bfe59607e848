"""From tokens back to text: each token is some bytes; they become text once a character is whole.

So a text can be read while it grows, one token at a time, and equals what comes out at the end.
A broken character costs one U+FFFD and never its neighbours.
"""

import codecs
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SPACE_MARK = "▁"

PieceBytes = Callable[[str], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteTable:
    """The bytes that each token id stands for inside a text.

    `strips_first_space`: encoding put a space before the text, so decoding takes one away.
    """

    bytes_of: Callable[[int], bytes]
    special_ids: frozenset[int]
    strips_first_space: bool


def sentencepiece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: marks are spaces, <0x0A> is one byte."""
    match = _BYTE_PIECE.match(piece)
    if match:
        return bytes([int(match.group(1), 16)])
    return piece.replace(_SPACE_MARK, " ").encode()


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a GPT-2 style piece, in which every byte is written as one printable character.

    Added tokens are written as they are; a character outside the alphabet gives them away.
    """
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return piece.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other bytes take the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + position): byte for position, byte in enumerate(others)
    }


class TextStream:
    """The text of a growing row of tokens; each token goes in once, in order."""

    def __init__(self, table: ByteTable, *, skip_special_tokens: bool) -> None:
        self._table = table
        self._skipped = table.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is not whole."""
        return self._decoder.decode(self._bytes(token_id))

    def finish(self) -> str:
        """What is left when no token follows: a broken character as U+FFFD, or nothing."""
        return self._decoder.decode(b"", True)

    def _bytes(self, token_id: int) -> bytes:
        content = b"" if token_id in self._skipped else self._table.bytes_of(token_id)
        if self._at_start and content:
            self._at_start = False
            return content.removeprefix(b" ") if self._table.strips_first_space else content
        return content


def decode_all(table: ByteTable, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
    """The text of a whole row of tokens: what a stream gives from the first push to finish."""
    stream = TextStream(table, skip_special_tokens=skip_special_tokens)
    parts = [stream.push(token_id) for token_id in token_ids]
    return "".join([*parts, stream.finish()])
