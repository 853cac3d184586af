//! Fields of fixed-size headers, at offsets that are checked at compile time.

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
