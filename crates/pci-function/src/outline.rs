//! Outline of a function, which survives a crash of the process that runs it.

/// Size of configuration space in bytes.
pub const CONFIG_SIZE: usize = 256;

/// Outline of a function: the state on which its VMM relies, and with which another instance can tell the driver that
/// the device has failed. All other state is lost with the process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outline {
    /// Configuration space.
    pub config: [u8; CONFIG_SIZE],
    /// Interrupts that the driver masks in a register of the function. 0 for functions without such a register.
    pub interrupt_mask: u32,
    /// Bus address of the memory that an active driver shares with the function; 0 if there is none.
    pub shared_region: u64,
}

impl Outline {
    /// Size of an encoded outline in bytes.
    pub const SIZE: usize = CONFIG_SIZE + 12;

    /// Encodes the outline, in native byte order: it does not leave the host.
    pub fn to_bytes(&self) -> [u8; Self::SIZE] {
        let Self { config, interrupt_mask, shared_region } = self;
        let mut bytes = [0; Self::SIZE];
        let parts = [&config[..], &interrupt_mask.to_ne_bytes(), &shared_region.to_ne_bytes()];
        for (to, from) in bytes.iter_mut().zip(parts.into_iter().flatten()) {
            *to = *from;
        }
        bytes
    }

    /// Decodes an outline. Returns `None` if the length is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (config, rest) = bytes.split_first_chunk()?;
        let (mask, rest) = rest.split_first_chunk()?;
        let shared = rest.try_into().ok()?;
        let (interrupt_mask, shared_region) = (u32::from_ne_bytes(*mask), u64::from_ne_bytes(shared));
        Some(Self { config: *config, interrupt_mask, shared_region })
    }
}
