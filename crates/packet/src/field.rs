//! Fields of headers: of fixed-size ones at offsets that are checked at compile time, and of headers that may be cut
//! off.

/// Returns the field at byte `AT` of a header. Its bounds are checked at compile time.
#[inline]
pub fn field<const AT: usize, const N: usize, const LEN: usize>(header: &[u8; LEN]) -> [u8; N] {
    const { assert!(AT + N <= LEN) };
    let mut value = [0; N];
    value.copy_from_slice(&header[AT..AT + N]);
    value
}

/// Stores the field at byte `AT` of a header. Its bounds are checked at compile time.
#[inline]
pub fn put<const AT: usize, const N: usize, const LEN: usize>(header: &mut [u8; LEN], value: [u8; N]) {
    const { assert!(AT + N <= LEN) };
    header[AT..AT + N].copy_from_slice(&value);
}

/// Returns the field at byte `AT` of a header that may be cut off. `None` if the bytes end before the field does.
#[inline]
pub fn peek<const AT: usize, const N: usize>(header: &[u8]) -> Option<[u8; N]> {
    header.get(AT..)?.first_chunk().copied()
}

/// Returns the big-endian number at byte `at`. `None` if the bytes end before it does.
#[inline]
pub fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|&number| u16::from_be_bytes(number))
}

/// Converts three big-endian bytes to a number.
#[inline]
pub const fn u24([high, middle, low]: [u8; 3]) -> u32 {
    u32::from_be_bytes([0, high, middle, low])
}

/// Converts the low 24 bits of a number to three big-endian bytes.
#[inline]
pub const fn u24_bytes(value: u32) -> [u8; 3] {
    let [_, high, middle, low] = value.to_be_bytes();
    [high, middle, low]
}
