//! Messages of a stream. Everything in them is untrusted until the part that it belongs to has checked it.

use prost::Message;

/// The machine, and the host that it runs on.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Hello {
    /// Version of the program, for messages to people.
    #[prost(string, tag = "1")]
    pub(crate) program: String,
    #[prost(string, tag = "2")]
    pub(crate) name: String,
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) mac: Vec<u8>,
    /// Bytes of memory.
    #[prost(uint64, tag = "4")]
    pub(crate) memory: u64,
    #[prost(uint32, tag = "5")]
    pub(crate) cpus: u32,
    /// Disks in their order.
    #[prost(message, repeated, tag = "6")]
    pub(crate) disks: Vec<Disk>,
    /// Features of a processor, as KVM's `kvm_cpuid_entry2`.
    #[prost(bytes = "vec", repeated, tag = "7")]
    pub(crate) cpuid: Vec<Vec<u8>>,
    #[prost(uint32, tag = "8")]
    pub(crate) mtu: u32,
}

/// A disk of the machine.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Disk {
    #[prost(uint64, tag = "1")]
    pub(crate) bytes: u64,
    #[prost(bool, tag = "2")]
    pub(crate) writable: bool,
}

/// State of a processor: structures of KVM.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Processor {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) mp_state: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) regs: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) sregs: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    pub(crate) xsave: Vec<u8>,
    #[prost(bytes = "vec", tag = "5")]
    pub(crate) xcrs: Vec<u8>,
    #[prost(bytes = "vec", tag = "6")]
    pub(crate) debug_regs: Vec<u8>,
    #[prost(bytes = "vec", tag = "7")]
    pub(crate) lapic: Vec<u8>,
    #[prost(bytes = "vec", tag = "8")]
    pub(crate) events: Vec<u8>,
    #[prost(message, repeated, tag = "9")]
    pub(crate) msrs: Vec<Msr>,
    /// Frequency of the time-stamp counter in kHz.
    #[prost(uint32, tag = "10")]
    pub(crate) tsc_khz: u32,
}

/// A model-specific register.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Msr {
    #[prost(uint32, tag = "1")]
    pub(crate) index: u32,
    #[prost(uint64, tag = "2")]
    pub(crate) data: u64,
}

/// State of the controllers that KVM provides: structures of KVM.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Controllers {
    /// The two 8259 and the I/O APIC.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub(crate) chips: Vec<Vec<u8>>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) timer: Vec<u8>,
    /// Nanoseconds of the guest's clock.
    #[prost(uint64, tag = "3")]
    pub(crate) clock: u64,
}

/// State of the ports.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Ports {
    /// Value of port 0xcf8.
    #[prost(uint32, tag = "1")]
    pub(crate) pci_address: u32,
    #[prost(message, optional, tag = "2")]
    pub(crate) console: Option<Serial>,
    #[prost(message, optional, tag = "3")]
    pub(crate) second: Option<Serial>,
    /// The guest has reported a panic.
    #[prost(bool, tag = "4")]
    pub(crate) panicked: bool,
}

/// State of a serial port.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Serial {
    /// Registers: divisor (low, high), interrupt enable and identification, line control and status, modem control and
    /// status, scratch.
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) registers: Vec<u8>,
    /// Bytes that the guest has not read.
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) received: Vec<u8>,
}

/// State of a slot that belongs to the VMM.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Slot {
    #[prost(uint32, tag = "1")]
    pub(crate) number: u32,
    /// Configuration space of function 0. The functions of the pair save their own.
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) config: Vec<u8>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) vectors: Vec<Vector>,
    /// Registers of a disk.
    #[prost(message, optional, tag = "4")]
    pub(crate) disk: Option<DiskRegisters>,
}

/// State of an MSI-X vector.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Vector {
    #[prost(uint32, tag = "1")]
    pub(crate) function: u32,
    #[prost(uint32, tag = "2")]
    pub(crate) vector: u32,
    #[prost(uint64, tag = "3")]
    pub(crate) address: u64,
    #[prost(uint32, tag = "4")]
    pub(crate) data: u32,
    #[prost(bool, tag = "5")]
    pub(crate) masked: bool,
    #[prost(bool, tag = "6")]
    pub(crate) pending: bool,
}

/// Registers of a virtio disk, and the state of its queue.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct DiskRegisters {
    #[prost(uint64, tag = "1")]
    pub(crate) accepted: u64,
    #[prost(uint32, tag = "2")]
    pub(crate) offered_select: u32,
    #[prost(uint32, tag = "3")]
    pub(crate) accepted_select: u32,
    #[prost(uint32, tag = "4")]
    pub(crate) config_vector: u32,
    #[prost(uint32, tag = "5")]
    pub(crate) status: u32,
    #[prost(uint32, tag = "6")]
    pub(crate) queue_select: u32,
    #[prost(uint32, tag = "7")]
    pub(crate) vector: u32,
    #[prost(uint32, tag = "8")]
    pub(crate) size: u32,
    #[prost(bool, tag = "9")]
    pub(crate) ready: bool,
    #[prost(uint32, tag = "10")]
    pub(crate) next_avail: u32,
    #[prost(uint32, tag = "11")]
    pub(crate) next_used: u32,
    #[prost(uint64, tag = "12")]
    pub(crate) descriptors: u64,
    #[prost(uint64, tag = "13")]
    pub(crate) available: u64,
    #[prost(uint64, tag = "14")]
    pub(crate) used: u64,
}
