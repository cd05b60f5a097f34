"""Checkpoints made to do harm, and the real ones that they are made from."""

import copyreg
import io
import json
import pickle
import struct
import warnings
import zipfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from crius.tools.convert.dcp import METADATA

ENTRY = "__0_0.distcp"
GIB = 1 << 30


def text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def call(function, *arguments):
    return function + b"(" + b"".join(arguments) + b"tR"


def payloads(marker):
    """Pickle operations that leave one value and, where a pickle is executed, make the folder ``marker``."""
    place, module = text(marker), call(name("builtins", "__import__"), text("os"))
    argument = b"(" + place + b"t"
    code = text(f"__import__('os').mkdir({marker!r})")
    mkdir = call(name("os", "mkdir"), place)
    evaluate = call(name("builtins", "eval"), code)
    inner = b"\x80\x04" + mkdir + b"."
    rebuild, metadata = (
        name("torch._utils", "_rebuild_tensor_v2"),
        name("torch.distributed.checkpoint.metadata", "Metadata"),
    )
    if 201 not in copyreg._inverted_registry:
        copyreg.add_extension("os", "mkdir", 201)
    return {
        "os.mkdir": mkdir,
        "posix.mkdir": call(name("posix", "mkdir"), place),
        "os.system": call(name("os", "system"), text(f"mkdir {marker}")),
        "eval": evaluate,
        "exec": call(name("builtins", "exec"), code),
        "subprocess": call(name("subprocess", "check_call"), b"]" + text("mkdir") + b"a" + place + b"a"),
        "stack_global": text("os") + text("mkdir") + b"\x93" + argument + b"R",
        "stack_global_dotted": text("shutil") + text("os.mkdir") + b"\x93" + argument + b"R",
        "stack_global_of_memo": text("os") + b"q\x70" + text("mkdir") + b"q\x71h\x70h\x71\x93" + argument + b"R\x8600",
        "getattr_chain": call(call(name("builtins", "getattr"), module, text("mkdir")), place),
        "inst": b"(" + place + b"ios\nmkdir\n",
        "obj": b"(" + name("os", "mkdir") + place + b"o",
        "newobj": name("builtins", "object") + b")\x810" + mkdir,
        "newobj_ex": name("builtins", "object") + b")}\x920" + mkdir,
        "build_state": call(name("types", "SimpleNamespace")) + b"}" + text("x") + evaluate + b"sb",
        "build_of_a_class": metadata + b"N}" + text("x") + mkdir + b"s\x86b",
        "extension": b"\x82\xc9" + argument + b"R",
        "nested_pickle": call(name("pickle", "loads"), b"B" + struct.pack("<I", len(inner)) + inner),
        "partial": call(call(name("functools", "partial"), name("os", "mkdir"), place)),
        "map": call(name("builtins", "list"), call(name("builtins", "map"), name("os", "mkdir"), b"]" + place + b"a")),
        "methodcaller": call(call(name("operator", "methodcaller"), text("mkdir"), place), module),
        "argument_of_a_harmless_name": call(name("torch", "Size"), evaluate),
        "argument_of_rebuild": call(rebuild, mkdir, b"K\x00", b")", b")", b"\x89", b"N"),
        "key_of_a_dict": b"}" + mkdir + b"K\x01s",
        "value_of_a_dict": b"}" + text("a") + mkdir + b"s",
    }


def unfired(marker):
    """Names that load, run or fetch something; they are refused by name, whatever they would do."""
    from_type = name("torch._tensor", "_rebuild_from_type_v2")
    return {
        "torch.load": call(name("torch", "load"), text(marker)),
        "torch.hub": call(name("torch.hub", "load"), text("owner/repo"), text("model")),
        "torch.jit": call(name("torch.jit", "load"), text(marker)),
        "rebuild_from_type": call(from_type, name("os", "mkdir"), b"N", b")", b"N"),
        "storage_from_bytes": call(name("torch.storage", "_load_from_bytes"), b"C\x01."),
        "inductor": call(name("torch._inductor.codecache", "PyCodeCache.load"), text("import os")),
        "prefix": call(name("torch Size.os", "mkdir"), text(marker)),
        "name_with_space": call(name("torch", "Size mkdir"), text(marker)),
        "dunder": call(name("torch", "Size.__subclasses__")),
        "bytearray": call(name("builtins", "bytearray"), b"\x8a\x05\x00\x00\x00\x00\x10"),
        "persistent_id": b"Pos.mkdir\n",
    }


def valid(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": {"a": torch.arange(6.0), "b": torch.ones(2, 3)}, "train_state": {"step": 4}}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return pickle.loads((folder / METADATA).read_bytes())


def put(folder, metadata):
    (folder / METADATA).write_bytes(metadata if isinstance(metadata, bytes) else pickle.dumps(metadata))


def archive(pickled, tensor=None):
    """What torch.save writes, with another pickle in it."""
    source, target = io.BytesIO(), io.BytesIO()
    torch.save(torch.arange(6.0) if tensor is None else tensor, source)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            is_pickle = info.filename.endswith("data.pkl")
            new.writestr(info.filename, pickled if is_pickle else old.read(info))
    return target.getvalue()


def replace_entry(folder, key, data, length=None):
    """Put ``data`` in place of the entry of ``key``."""
    metadata = pickle.loads((folder / METADATA).read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == key:
            info.offset = (folder / ENTRY).stat().st_size
            info.length = len(data) if length is None else length
    with (folder / ENTRY).open("ab") as file:
        file.write(data)
    put(folder, metadata)


def plant(folder, how, payload):
    """A checkpoint with a payload in it."""
    metadata = valid(folder)
    good = (folder / METADATA).read_bytes()
    if how == "metadata":
        put(folder, b"\x80\x04" + payload + b".")
    elif how == "before_metadata":
        put(folder, b"\x80\x04" + payload + b"0" + good)
    elif how == "after_metadata":
        put(folder, good[:-1] + payload + b"0.")
    elif how == "tensor":
        replace_entry(folder, "model.a", archive(b"\x80\x04" + payload + b"."))
    elif how == "value":
        replace_entry(folder, "train_state.step", archive(b"\x80\x04" + payload + b"."))
    else:
        replace_entry(folder, "model.a", b"\x80\x04" + payload + b".")  # no archive at all: how torch saved before 1.6
    assert metadata.state_dict_metadata


def safetensors(header, data=b"\0" * 16):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def entry(dtype="F32", shape=(4,), offsets=(0, 16), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def link_out(file: Path) -> None:
    """A file becomes a link out of its folder to what it was."""
    file.symlink_to(file.rename(file.parent.with_name(f"{file.name}.real")))
