//! The header of a stream: the saved device, the program that saved it, and the features that a reader must know.

use crate::LoadError;

/// Names of the features that this release knows, see [`Header::needs`].
pub const FEATURES: &[&str] = &[];

/// Kind of a saved device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DeviceKind {
    /// The RDMA function.
    Pvrdma,
    /// The network function.
    Vmxnet3,
}

/// Header of a saved state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    /// Version of the program that saved the device. For people: no reader decides by it.
    pub product: String,
    /// Kind of the device.
    pub device: DeviceKind,
    /// Name of the device in the configuration.
    pub name: String,
    /// MAC address of the device.
    pub mac: [u8; 6],
    /// Time of the save in milliseconds since 1970-01-01 UTC.
    pub time: u64,
    /// The save belongs to a live migration: the VMM logged the pages that the device wrote.
    pub live: bool,
    /// Names of features that a reader must know to restore the state correctly.
    pub needs: Vec<String>,
}

/// The header on the wire.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HeaderMessage {
    #[prost(uint32, tag = "1")]
    format: u32,
    #[prost(string, tag = "2")]
    product: String,
    #[prost(enumeration = "DeviceCode", tag = "3")]
    device: i32,
    #[prost(string, tag = "4")]
    name: String,
    #[prost(bytes = "vec", tag = "5")]
    mac: Vec<u8>,
    #[prost(uint64, tag = "6")]
    time: u64,
    #[prost(bool, tag = "7")]
    live: bool,
    #[prost(string, repeated, tag = "8")]
    needs: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
enum DeviceCode {
    None = 0,
    Pvrdma = 1,
    Vmxnet3 = 2,
}

impl Header {
    /// Version of the format that this crate writes and reads.
    pub const FORMAT: u32 = 1;

    /// Creates a header of this program for a device without a name, saved at time 0.
    pub fn new(device: DeviceKind, mac: [u8; 6]) -> Self {
        Self {
            product: env!("CARGO_PKG_VERSION").to_owned(),
            device,
            name: String::new(),
            mac,
            time: 0,
            live: false,
            needs: Vec::new(),
        }
    }

    pub(crate) fn to_message(&self) -> HeaderMessage {
        let Self { product, device, name, mac, time, live, needs } = self.clone();
        let device = match device {
            DeviceKind::Pvrdma => DeviceCode::Pvrdma,
            DeviceKind::Vmxnet3 => DeviceCode::Vmxnet3,
        };
        let (format, device) = (Self::FORMAT, device.into());
        HeaderMessage { format, product, device, name, mac: mac.to_vec(), time, live, needs }
    }

    /// Checks a header. `features` are the names that the reader knows.
    pub(crate) fn from_message(message: HeaderMessage, features: &[&str]) -> Result<Self, LoadError> {
        let HeaderMessage { format, product, device, name, mac, time, live, needs } = message;
        if format != Self::FORMAT {
            return Err(LoadError::Version { found: format });
        }
        if let Some(name) = needs.iter().find(|name| !features.contains(&name.as_str())) {
            return Err(LoadError::Needs { name: name.clone() });
        }
        let device = match DeviceCode::try_from(device) {
            Ok(DeviceCode::Pvrdma) => DeviceKind::Pvrdma,
            Ok(DeviceCode::Vmxnet3) => DeviceKind::Vmxnet3,
            Ok(DeviceCode::None) | Err(_) => return Err(LoadError::Header { field: "device kind" }),
        };
        let mac = mac.try_into().map_err(|_| LoadError::Header { field: "MAC address" })?;
        Ok(Self { product, device, name, mac, time, live, needs })
    }
}
