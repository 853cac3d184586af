//! Messages of the network function: registers, session, rings and filters. Kinds `0x04xx`.
//!
//! A stream is a [`Function`], then, if a driver is active, any number of [`MulticastAddresses`].

/// Declares messages. With the feature `stream`, they have the encoding that their attributes describe.
macro_rules! messages {
    ($($(#[doc = $doc:literal])* pub struct $message:ident {
        $($(#[doc = $about:literal])* #[prost($($encoding:tt)*)] pub $field:ident: $type:ty,)*
    })*) => {$(
        $(#[doc = $doc])*
        #[derive(Clone, PartialEq)]
        #[cfg_attr(feature = "stream", derive(prost::Message))]
        #[cfg_attr(not(feature = "stream"), derive(Debug, Default))]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        pub struct $message {
            $($(#[doc = $about])* #[cfg_attr(feature = "stream", prost($($encoding)*))] pub $field: $type,)*
        }
    )*};
}

messages! {
    /// State of the function.
    pub struct Function {
        /// Configuration space.
        #[prost(bytes = "vec", tag = "1")]
        pub config_space: Vec<u8>,
        /// Revision that the driver has chosen, 1 to 3.
        #[prost(uint32, tag = "2")]
        pub revision: u32,
        /// Registers with the bus address of the shared area.
        #[prost(uint64, tag = "3")]
        pub shared: u64,
        /// Result of the last command.
        #[prost(uint32, tag = "4")]
        pub result: u32,
        /// MAC address that the driver has set, 6 bytes.
        #[prost(bytes = "vec", tag = "5")]
        pub mac: Vec<u8>,
        /// Coalescing scheme, 16 bytes as in the guest's memory (`CoalesceScheme`).
        #[prost(bytes = "vec", tag = "6")]
        pub coalesce: Vec<u8>,
        /// Interrupts.
        #[prost(message, optional, tag = "7")]
        pub interrupts: Option<Interrupts>,
        /// Statistics of the transmit queues, by number.
        #[prost(message, repeated, tag = "8")]
        pub transmit_statistics: Vec<Statistics>,
        /// Statistics of the receive queues, by number.
        #[prost(message, repeated, tag = "9")]
        pub receive_statistics: Vec<Statistics>,
        /// Counters of the device.
        #[prost(message, optional, tag = "10")]
        pub counters: Option<Counters>,
        /// Session of the driver, if one is active.
        #[prost(message, optional, tag = "11")]
        pub session: Option<Session>,
    }

    /// State of the interrupts. Bus mastering, MSI-X Enable and Interrupt Disable are in configuration space.
    pub struct Interrupts {
        /// Raising a vector masks it.
        #[prost(bool, tag = "1")]
        pub auto_mask: bool,
        /// Cause register of the legacy line.
        #[prost(bool, tag = "2")]
        pub cause: bool,
        /// All vectors.
        #[prost(message, repeated, tag = "3")]
        pub vectors: Vec<Vector>,
        /// Number of interrupts delivered, for the operator.
        #[prost(uint64, tag = "4")]
        pub delivered: u64,
    }

    /// State of an interrupt vector.
    pub struct Vector {
        /// The vector is masked.
        #[prost(bool, tag = "1")]
        pub masked: bool,
        /// There was a cause that has not been delivered.
        #[prost(bool, tag = "2")]
        pub pending: bool,
        /// The vector was masked by being raised, and the driver has not unmasked it yet.
        #[prost(bool, tag = "3")]
        pub in_round: bool,
        /// Number of rounds that have ended.
        #[prost(uint32, tag = "4")]
        pub rounds: u32,
    }

    /// Statistics of a queue.
    pub struct Statistics {
        /// Values in the order of the guest's memory (`UPT1_TxStats`, `UPT1_RxStats`).
        #[prost(uint64, repeated, tag = "1")]
        pub values: Vec<u64>,
    }

    /// Counters of the device, for its operator.
    pub struct Counters {
        /// Sent frames.
        #[prost(uint64, tag = "1")]
        pub sent_frames: u64,
        /// Bytes of sent frames.
        #[prost(uint64, tag = "2")]
        pub sent_bytes: u64,
        /// Received frames.
        #[prost(uint64, tag = "3")]
        pub received_frames: u64,
        /// Bytes of received frames.
        #[prost(uint64, tag = "4")]
        pub received_bytes: u64,
        /// Invalid frames of the guest.
        #[prost(uint64, tag = "5")]
        pub send_errors: u64,
        /// Frames of the guest that found no room.
        #[prost(uint64, tag = "6")]
        pub send_discards: u64,
        /// Frames that found no receive buffer.
        #[prost(uint64, tag = "7")]
        pub receive_no_buffers: u64,
        /// Frames that the guest's filters refused.
        #[prost(uint64, tag = "8")]
        pub receive_filtered: u64,
        /// Queues that were stopped.
        #[prost(uint64, tag = "9")]
        pub queue_errors: u64,
        /// Refused commands.
        #[prost(uint64, tag = "10")]
        pub command_errors: u64,
        /// Activations by a driver.
        #[prost(uint64, tag = "11")]
        pub activations: u64,
        /// Resets.
        #[prost(uint64, tag = "12")]
        pub resets: u64,
    }

    /// Session of a driver.
    pub struct Session {
        /// Bus address of the shared area.
        #[prost(uint64, tag = "1")]
        pub shared: u64,
        /// Bus address of the queue descriptors.
        #[prost(uint64, tag = "2")]
        pub queue_descriptors: u64,
        /// Revision of the driver, 1 to 3.
        #[prost(uint32, tag = "3")]
        pub revision: u32,
        /// MTU in bytes.
        #[prost(uint32, tag = "4")]
        pub mtu: u32,
        /// Vector of events.
        #[prost(uint32, tag = "5")]
        pub event_vector: u32,
        /// State of the link of which the driver was last notified.
        #[prost(bool, tag = "6")]
        pub link_reported: bool,
        /// Features (`uptFeatures`).
        #[prost(uint32, tag = "7")]
        pub features: u32,
        /// Receive mode (`rxMode`).
        #[prost(uint32, tag = "8")]
        pub receive_mode: u32,
        /// VLAN filter, 512 bytes with a bit for each VLAN.
        #[prost(bytes = "vec", tag = "9")]
        pub vlans: Vec<u8>,
        /// Receive side scaling, if it is configured.
        #[prost(message, optional, tag = "10")]
        pub rss: Option<Rss>,
        /// Transmit queues, 1 to 8.
        #[prost(message, repeated, tag = "11")]
        pub transmit: Vec<TransmitQueue>,
        /// Receive queues, 1 to 8.
        #[prost(message, repeated, tag = "12")]
        pub receive: Vec<ReceiveQueue>,
    }

    /// Configuration of receive side scaling.
    pub struct Rss {
        /// Types of frames that are hashed (`hashType`).
        #[prost(uint32, tag = "1")]
        pub hash_types: u32,
        /// Key, 40 bytes.
        #[prost(bytes = "vec", tag = "2")]
        pub key: Vec<u8>,
        /// Indirection table: numbers of receive queues, 1 to 128.
        #[prost(bytes = "vec", tag = "3")]
        pub table: Vec<u8>,
    }

    /// A ring in the guest's memory, and the position at which the device continues.
    pub struct Ring {
        /// Bus address.
        #[prost(uint64, tag = "1")]
        pub base: u64,
        /// Number of descriptors.
        #[prost(uint32, tag = "2")]
        pub entries: u32,
        /// Index of the next descriptor.
        #[prost(uint32, tag = "3")]
        pub index: u32,
        /// Generation of the next descriptor.
        #[prost(bool, tag = "4")]
        pub generation: bool,
    }

    /// A transmit queue.
    pub struct TransmitQueue {
        /// Command ring.
        #[prost(message, optional, tag = "1")]
        pub ring: Option<Ring>,
        /// Completion ring.
        #[prost(message, optional, tag = "2")]
        pub completions: Option<Ring>,
        /// Interrupt vector.
        #[prost(uint32, tag = "3")]
        pub vector: u32,
        /// Error code for which the queue has stopped; 0 while it runs.
        #[prost(uint32, tag = "4")]
        pub error: u32,
    }

    /// A receive queue.
    pub struct ReceiveQueue {
        /// Ring 1.
        #[prost(message, optional, tag = "1")]
        pub first: Option<Ring>,
        /// Ring 2, if there is one.
        #[prost(message, optional, tag = "2")]
        pub second: Option<Ring>,
        /// Completion ring.
        #[prost(message, optional, tag = "3")]
        pub completions: Option<Ring>,
        /// Data ring, if there is one.
        #[prost(message, optional, tag = "4")]
        pub data: Option<DataRing>,
        /// Interrupt vector.
        #[prost(uint32, tag = "5")]
        pub vector: u32,
        /// Maximum number of buffers per frame, 1 to 64.
        #[prost(uint32, tag = "6")]
        pub max_buffers: u32,
        /// The driver is asked to ring a doorbell when it posts buffers (`updateRxProd`).
        #[prost(bool, tag = "7")]
        pub doorbell_wanted: bool,
        /// Error code for which the queue has stopped; 0 while it runs.
        #[prost(uint32, tag = "8")]
        pub error: u32,
        /// Number of the driver's rounds that had ended when a long frame began to wait for buffers, if one waits.
        #[prost(uint32, optional, tag = "9")]
        pub waits_since: Option<u32>,
    }

    /// A receive data ring: one slot for each descriptor of ring 1.
    pub struct DataRing {
        /// Bus address.
        #[prost(uint64, tag = "1")]
        pub base: u64,
        /// Size of a slot in bytes.
        #[prost(uint32, tag = "2")]
        pub slot: u32,
    }

    /// Addresses of the multicast filter. Those of all records count.
    pub struct MulticastAddresses {
        /// MAC addresses, 6 bytes each.
        #[prost(bytes = "vec", tag = "1")]
        pub addresses: Vec<u8>,
    }
}

#[cfg(feature = "stream")]
crate::stream::records! {
    0x0401 => Function,
    0x0402 => MulticastAddresses,
}
