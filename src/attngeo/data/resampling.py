"""Antialiased bilinear and bicubic reduction and enlargement of 8-bit images in whole numbers.

The arithmetic is that of torch's `interpolate(uint8, antialias=True)`, to the bit: one axis after the other, columns
first, each output a sum of inputs with 16-bit fixed-point weights, rounded to 8 bits. Written so that Numba can compile
it, for the loader that decodes without torch; as plain Python it is the same and slow.
"""

import math

import numpy as np

INTERPOLATIONS = ("auto", "bilinear", "bicubic")
WEIGHT_BITS = 15
CUBIC = -0.5  # the coefficient of Keys's kernel that antialiased resizing uses


def kernel(distance, cubic):  # Numba infers the types
    """Weight of an input at that distance, in units of the support of the reduced image's pixel."""
    x = abs(distance)
    if not cubic:
        return 1.0 - x if x < 1.0 else 0.0
    if x < 1.0:
        return ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1.0
    if x < 2.0:
        return (((x - 5.0) * x + 8.0) * x - 4.0) * CUBIC
    return 0.0


def weights_of(size_in, size_out, cubic, kernel):
    """First input, number of inputs and fixed-point weights [size_out, taps] of each output, and the weights' bits."""
    scale = size_in / size_out
    stretch = max(scale, 1.0)
    support = (2.0 if cubic else 1.0) * stretch
    taps = math.ceil(support) * 2 + 1
    first = np.zeros(size_out, np.int64)
    count = np.zeros(size_out, np.int64)
    shares = np.zeros((size_out, taps), np.float64)
    largest = 0.0
    for place in range(size_out):
        centre = scale * (place + 0.5)
        start = max(int(centre - support + 0.5), 0)
        number = min(min(int(centre + support + 0.5), size_in) - start, taps)
        total = 0.0
        for tap in range(number):
            share = kernel((tap + start - centre + 0.5) * (1.0 / stretch), cubic)
            shares[place, tap] = share
            total += share
        for tap in range(number):
            shares[place, tap] /= total
            largest = max(largest, shares[place, tap])
        first[place], count[place] = start, number
    bits = 0
    while bits < 22 and int(0.5 + largest * (1 << (bits + 1))) < (1 << WEIGHT_BITS):
        bits += 1
    fixed = np.zeros((size_out, taps), np.int64)
    for place in range(size_out):
        for tap in range(count[place]):
            share = shares[place, tap] * (1 << bits)
            fixed[place, tap] = int(share + 0.5) if share >= 0 else int(share - 0.5)
    return first, count, fixed, bits


def weighted_rows(rows, output, weights):
    """Each row of `output` uint8 [m, n] as a weighted sum of neighbouring `rows` uint8 [k, n], rounded."""
    first, count, fixed, bits = weights
    half = 1 << (bits - 1)
    total = np.empty(rows.shape[1], np.int32)
    for place in range(output.shape[0]):
        total[:] = half
        for tap in range(count[place]):
            row = rows[first[place] + tap]
            share = np.int32(fixed[place, tap])
            # 32 bits hold 255 times the sum of the weights, and the compiler takes several columns at a time.
            for column in range(total.shape[0]):
                total[column] += np.int32(share * np.int32(row[column]))
        for column in range(total.shape[0]):
            output[place, column] = min(max(total[column] >> bits, 0), 255)


def turn(pixels, turned):
    """Exchange rows and columns of `pixels` [h, w, 3]."""
    for y in range(pixels.shape[0]):
        for x in range(pixels.shape[1]):
            for channel in range(3):
                turned[x, y, channel] = pixels[y, x, channel]


def resample(pixels, output, cubic, turn, weighted_rows, weights_of, kernel):
    """Resize `pixels` uint8 [h, w, 3] into `output` uint8 [H, W, 3]; the functions are those of this module.

    The image is turned for its columns, since sums of whole rows are several times faster than sums within a row.
    """
    height, width = pixels.shape[0], pixels.shape[1]
    rows, columns = output.shape[0], output.shape[1]
    turned = np.empty((width, height, 3), np.uint8)
    turn(pixels, turned)
    fewer = np.empty((columns, height, 3), np.uint8)
    weights = weights_of(width, columns, cubic, kernel)
    weighted_rows(turned.reshape(width, height * 3), fewer.reshape(columns, height * 3), weights)
    narrowed = np.empty((height, columns, 3), np.uint8)
    turn(fewer, narrowed)
    weights = weights_of(height, rows, cubic, kernel)
    weighted_rows(narrowed.reshape(height, columns * 3), output.reshape(rows, columns * 3), weights)


PARTS = (turn, weighted_rows, weights_of, kernel)
