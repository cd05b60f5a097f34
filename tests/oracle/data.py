"""From documents and samples to the sequences of each step."""

from dataclasses import dataclass

import torch

NO_LABEL = -100
END_OF_DOCUMENT = 256  # the tokens below are bytes
WORD = 2**64


@dataclass
class Sequence:
    """Inputs, the label of each input or ``NO_LABEL``, and the position of each input in its document."""

    inputs: list
    labels: list
    positions: list


def windows(documents, length, predict_end=True):
    """The documents one after the other, each with its end, cut into sequences whose labels are the next tokens."""
    stream = []
    for text in documents:
        stream += text.encode()
        stream.append(END_OF_DOCUMENT)
    found = []
    for start in range(0, len(stream) - length, length):
        inputs = stream[start : start + length]
        labels = stream[start + 1 : start + length + 1]
        if not predict_end:
            labels = [NO_LABEL if label == END_OF_DOCUMENT else label for label in labels]
        positions = []
        for place, token in enumerate(inputs):
            starts_document = place == 0 or token == END_OF_DOCUMENT
            positions.append(0 if starts_document else positions[-1] + 1)
        found.append(Sequence(inputs, labels, positions))
    return found


def packed(samples, length, seed):
    """First-fit decreasing: the longest samples first, each into the first sequence with room for all of it.

    Args:
        samples: ids of each sample, and for each id whether it is to be predicted.
        length: tokens per sequence; a longer sample is cut.
        seed: decides about the order of samples of one length.
    """
    used = [(ids[:length], targets[:length]) for ids, targets in samples if any(targets[1:length])]
    drawn = [permuted(number, len(used), mixed(seed)) for number in range(len(used))]
    by_length = sorted(range(len(used)), key=lambda number: (-len(used[number][0]), drawn[number]))
    bins = []
    for number in by_length:
        size = len(used[number][0])
        fitting = [held for held in bins if sum(len(used[other][0]) for other in held) + size <= length]
        if fitting:
            fitting[0].append(number)
        else:
            bins.append([number])
    return [joined([used[number] for number in held], length) for held in bins]


def joined(samples, length):
    """Samples in one sequence, each with positions of its own, and padding behind them."""
    sequence = Sequence([], [], [])
    for ids, targets in samples:
        following = zip(ids[1:], targets[1:], strict=True)
        sequence.inputs += ids
        sequence.labels += [token if is_target else NO_LABEL for token, is_target in following]
        sequence.labels.append(NO_LABEL)
        sequence.positions += range(len(ids))
    missing = length - len(sequence.inputs)
    sequence.inputs += [0] * missing
    sequence.labels += [NO_LABEL] * missing
    sequence.positions += range(missing)
    return sequence


def scrambled(value):
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % WORD
    return value ^ (value >> 31)


def mixed(value):
    """One number of SplitMix64."""
    return scrambled((value + 0x9E3779B97F4A7C15) % WORD)


def permuted(index, size, key):
    """The image of ``index`` under a permutation of ``range(size)``: a Feistel network of 8 rounds.

    Its domain is a square of a power of two; an image outside of the range goes through the network again.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left = index >> half
        right = index % 2**half
        for number in range(8):
            scrambled_right = scrambled(right ^ mixed(key + number)) % 2**half
            left, right = right, left ^ scrambled_right
        index = (left << half) + right
        if index < size:
            return index


def sequences_of_step(step, sequences, settings):
    """The sequences of a step, counted from 0. Each epoch has all of them, in an order of its own."""
    size = len(sequences)
    first = step * settings["training.global_batch_size"]
    last = first + settings["training.global_batch_size"]
    if settings["training.epochs"] > 0:
        last = min(last, settings["training.epochs"] * size)
    found = []
    for number in range(first, last):
        epoch, place = divmod(number, size)
        if settings["data.shuffle"]:
            place = permuted(place, size, mixed(mixed(settings["debug.seed"]) ^ epoch))
        found.append(sequences[place])
    return found


def spread(sequences, count):
    """``count`` of the sequences, or all, evenly spread."""
    count = min(count, len(sequences))
    return [sequences[number * len(sequences) // count] for number in range(count)]


def tensors(sequences):
    """Inputs, labels and positions of some sequences, each ``(B, T)``."""
    columns = ("inputs", "labels", "positions")
    return [torch.tensor([getattr(sequence, column) for sequence in sequences]) for column in columns]
