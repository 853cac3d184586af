//! Fields of a message's body, in order.

use rustix::io::Errno;

/// Rest of a body.
#[derive(Debug)]
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Errno> {
        let (&field, rest) = self.0.split_first_chunk::<N>().ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(field)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Errno> {
        self.take().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Errno> {
        self.take().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Errno> {
        self.take().map(u64::from_le_bytes)
    }

    /// Parses the space that the client announces. Clients count it differently (Cloud Hypervisor adds the header), so
    /// only a value below the fixed part is refused.
    pub(crate) fn argsz(&mut self, least: u32) -> Result<u32, Errno> {
        self.u32().and_then(|argsz| if argsz < least { Err(Errno::INVAL) } else { Ok(argsz) })
    }

    pub(crate) const fn end(&self) -> Result<(), Errno> {
        if self.0.is_empty() { Ok(()) } else { Err(Errno::INVAL) }
    }

    /// Returns the bytes that are left.
    pub(crate) const fn rest(&self) -> &'a [u8] {
        self.0
    }
}
