"""The columns of an operation on images, and the operations: what image_program.py writes and image_ops.py reads.

X, Y and OTHER are each followed by the strides of their pixels, rows and images, all in floats of a thread's scratch.
C, H, W are the sizes of what is read, N, HO, WO of what is made; K, S, D, P the kernel, stride, dilation and the pads
before it; ACT is an activation (activation.code_of); WEIGHT and BIAS are addresses; GROUP images go through together;
PADDED is what a pixel of the output is padded to, where those pads must be zero; WINDOWS makes SIDE pixels in a vector.
DENSE and NARROW have their number of terms in KH and of columns in KW; DENSE, where it makes pixels of SX channels, has
the first of its columns in PX. NORMALISE has its kind in KH, AVG_POOL what counts its pads in OTHER.
"""

# fmt: off
(CODE, ACT, X, X_PIXEL, X_ROW, X_IMAGE, H, W, C, Y, Y_PIXEL, Y_ROW, Y_IMAGE, HO, WO, N, KH, KW, SY, SX, DY, DX, PY, PX,
 OTHER, O_PIXEL, O_ROW, O_IMAGE, WEIGHT, BIAS, GROUP, PADDED, SIDE, COLUMNS) = range(34)
(LOAD, LOOK_UP, TAPS, WINDOWS, DENSE, DOT, MAX_POOL, AVG_POOL, GLOBAL_MAX, GLOBAL_MEAN, ADD, MUL, SCALE, COPY,
 ACTIVATE, PAIRS_IN, PAIRS_OUT, NORMALISE, STORE, STORE_ROWS, STORE_PIXELS, NARROW, LOAD_ROWS) = range(23)
# fmt: on
