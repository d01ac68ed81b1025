"""Addresses of exported symbols in an ELF file, from its dynamic symbol table, which stripping leaves in place.

64-bit little-endian only (x86-64, aarch64). The file is untrusted: whatever it holds, the answer is a dictionary or
ElfError.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["ElfError", "ElfSymbols", "read_symbols"]

_SHT_DYNSYM: Final = 11
_PT_LOAD: Final = 1
_MAX_SECTION: Final = 64 << 20


class ElfError(Exception):
    """Not an ELF file that can be read here."""


@dataclass(frozen=True, slots=True)
class ElfSymbols:
    addresses: dict[str, int]
    """Virtual addresses in the file of the wanted symbols that it defines."""
    first_page: int
    """Virtual address, in the file, of the page that maps its beginning: load address − this is what to add."""


def read_symbols(path: Path, wanted: Collection[str]) -> ElfSymbols:
    """ElfError if the file cannot be read or is no 64-bit little-endian ELF file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ElfError(f"{path}: {error.strerror}") from None
    try:
        return _read(fd, wanted)
    except (struct.error, IndexError, OSError, OverflowError, ValueError) as error:
        raise ElfError(f"{path} is no ELF file that can be read here: {error}") from None
    finally:
        os.close(fd)


def _read(fd: int, wanted: Collection[str]) -> ElfSymbols:
    head = os.pread(fd, 64, 0)
    if head[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not 64-bit little-endian")
    phoff, shoff = struct.unpack_from("<QQ", head, 32)
    phentsize, phnum, shentsize, shnum = struct.unpack_from("<HHHH", head, 54)
    return ElfSymbols(
        addresses=_addresses(fd, _table(fd, shoff, shentsize, shnum, 64), {name.encode() for name in wanted}),
        first_page=_first_page(_table(fd, phoff, phentsize, phnum, 56)),
    )


def _table(fd: int, offset: int, entry_size: int, count: int, least: int) -> list[bytes]:
    if entry_size < least or entry_size * count > _MAX_SECTION:
        raise ValueError("odd header table")
    data = os.pread(fd, entry_size * count, offset)
    return [data[at : at + entry_size] for at in range(0, entry_size * count, entry_size)]


def _first_page(program_headers: list[bytes]) -> int:
    for header in program_headers:
        kind, _flags, offset, address = struct.unpack_from("<IIQQ", header)
        if kind == _PT_LOAD:
            return int(address - offset)
    raise ValueError("nothing to load")


def _addresses(fd: int, sections: list[bytes], wanted: set[bytes]) -> dict[str, int]:
    found: dict[str, int] = {}
    for section in sections:
        _name, kind, _flags, _addr, offset, size, link = struct.unpack_from("<IIQQQQI", section)
        if kind != _SHT_DYNSYM:
            continue
        names_offset, names_size = struct.unpack_from("<QQ", sections[link], 24)
        if max(size, names_size) > _MAX_SECTION:
            raise ValueError("symbol table too large")
        names = os.pread(fd, names_size, names_offset)
        symbols = os.pread(fd, size - size % 24, offset)
        for name_at, _info, _other, section_index, value, _size in struct.iter_unpack("<IBBHQQ", symbols):
            if section_index and value:
                name = names[name_at : names.find(b"\0", name_at)]
                if name in wanted:
                    found[name.decode()] = value
    return found
