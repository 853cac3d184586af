//! A device in the words of the command line and of the file.

use std::collections::HashSet;
use std::path::PathBuf;
use std::str::FromStr;

use pvrdma_verbs::MacAddr;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as ValueError, StrDeserializer};
use serde::{Deserialize, Deserializer};

use super::fault::FaultSpec;
use super::limits::LimitsSpec;
use super::link::LinkSpec;
use super::tunnel::{Learn, TunnelAddress};
use super::words::{Forged, Pcp, Pin, Roce, Switch};

/// A device as the file or the command line describes it, possibly incompletely.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// Name in logs and status.
    pub name: String,
    /// Where the VMM connects.
    pub socket: Option<PathBuf>,
    /// Ethernet address of the paired network function.
    #[serde(default, deserialize_with = "mac")]
    pub mac: Option<MacAddr>,
    /// Encapsulation.
    pub roce: Option<Roce>,
    /// Residency of guest memory.
    pub pin: Option<Pin>,
    /// Interface version.
    pub version: Option<u32>,
    /// Whether there is a legacy interrupt.
    pub intx: Option<bool>,
    /// The way to other hosts: `unix:PATH`, `unix-connect:PATH`, `unix-dgram:LOCAL:REMOTE`, `tap:NAME`,
    /// `af_packet:INTERFACE` or
    /// `vxlan:ADDRESS[:PORT]`.
    pub uplink: Option<LinkSpec>,
    /// Other ends of a vxlan uplink, `ADDRESS[:PORT]`. A list in the file, a key that may come again on the command line.
    #[serde(default, rename = "remote")]
    pub remotes: Vec<TunnelAddress>,
    /// Network identifier of a vxlan uplink.
    pub vni: Option<u32>,
    /// What a vxlan uplink learns: `stations` behind the remotes, or also `remotes`.
    pub learn: Option<Learn>,
    /// The link to the paired network function.
    pub nic: Option<LinkSpec>,
    /// Bytes of an IP packet that the network carries.
    pub mtu: Option<u32>,
    /// VLAN of both functions.
    pub vlan: Option<u16>,
    /// Priorities of packets without a VLAN.
    pub pcp: Option<Pcp>,
    /// Forged transmits.
    pub forged: Option<Forged>,
    /// Congestion control, with the parameters of the file.
    pub congestion: Option<Switch>,
    /// What the uplink suffers from, for tests.
    pub fault: Option<FaultSpec>,
    /// Upper limits, in the file only.
    #[serde(default)]
    pub limits: LimitsSpec,
}

fn mac<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<MacAddr>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// Keys of `--device`.
const KEYS: &str = "name, socket, mac, roce, pin, version, intx, uplink, remote, vni, learn, nic, mtu, vlan, pcp, forged, \
    congestion, fault";

impl FromStr for DeviceSpec {
    type Err = String;

    /// Parses `key=value,key=value`. Values hold no commas; a path that has one goes into the file.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut spec = Self::named(String::new());
        let mut seen = HashSet::new();
        for part in text.split(',') {
            let (key, value) = part.split_once('=').unwrap_or((part, if part == "intx" { "true" } else { "" }));
            if value.is_empty() {
                return Err(format!("'{part}': expected KEY=VALUE (the keys are {KEYS})"));
            }
            match key {
                "name" => value.clone_into(&mut spec.name),
                "socket" => spec.socket = Some(PathBuf::from(value)),
                "mac" => spec.mac = Some(value.parse()?),
                "roce" => spec.roce = Some(word(key, value)?),
                "pin" => spec.pin = Some(word(key, value)?),
                "version" => {
                    spec.version = Some(value.parse().map_err(|_| format!("version: '{value}' is not a number"))?);
                }
                "intx" => spec.intx = Some(value.parse().map_err(|_| format!("intx: '{value}' is not true or false"))?),
                "uplink" => spec.uplink = Some(value.parse().map_err(|error| format!("uplink: {error}"))?),
                "remote" => spec.remotes.push(value.parse().map_err(|error| format!("remote: {error}"))?),
                "vni" => spec.vni = Some(value.parse().map_err(|_| format!("vni: '{value}' is not a number"))?),
                "learn" => spec.learn = Some(word(key, value)?),
                "nic" => spec.nic = Some(value.parse().map_err(|error| format!("nic: {error}"))?),
                "mtu" => spec.mtu = Some(value.parse().map_err(|_| format!("mtu: '{value}' is not a number"))?),
                "vlan" => spec.vlan = Some(value.parse().map_err(|_| format!("vlan: '{value}' is not a number"))?),
                "pcp" => spec.pcp = Some(word(key, value)?),
                "forged" => spec.forged = Some(word(key, value)?),
                "congestion" => spec.congestion = Some(word(key, value)?),
                "fault" => spec.fault = Some(value.parse().map_err(|error| format!("fault: {error}"))?),
                _ => return Err(format!("unknown key '{key}' (the keys are {KEYS})")),
            }
            if !seen.insert(key) && key != "remote" {
                return Err(format!("'{key}' is given twice"));
            }
        }
        if spec.name.is_empty() {
            return Err("a device needs a name (name=NAME)".to_owned());
        }
        Ok(spec)
    }
}

/// One of a few words.
fn word<'de, T: Deserialize<'de>>(key: &str, value: &'de str) -> Result<T, String> {
    let deserializer: StrDeserializer<'_, ValueError> = value.into_deserializer();
    T::deserialize(deserializer).map_err(|error| format!("{key}: {error}"))
}

impl DeviceSpec {
    fn named(name: String) -> Self {
        Self {
            name,
            socket: None,
            mac: None,
            roce: None,
            pin: None,
            version: None,
            intx: None,
            uplink: None,
            remotes: Vec::new(),
            vni: None,
            learn: None,
            nic: None,
            mtu: None,
            vlan: None,
            pcp: None,
            forged: None,
            congestion: None,
            fault: None,
            limits: LimitsSpec::default(),
        }
    }

    /// Takes what the command line gives.
    pub(super) fn override_with(&mut self, other: Self) {
        let Self {
            name: _,
            socket,
            mac,
            roce,
            pin,
            version,
            intx,
            uplink,
            remotes,
            vni,
            learn,
            nic,
            mtu,
            vlan,
            pcp,
            forged,
            congestion,
            fault,
            limits: _,
        } = other;
        self.socket = socket.or_else(|| self.socket.take());
        self.mac = mac.or(self.mac);
        self.roce = roce.or(self.roce);
        self.pin = pin.or(self.pin);
        self.version = version.or(self.version);
        self.intx = intx.or(self.intx);
        self.uplink = uplink.or_else(|| self.uplink.take());
        if !remotes.is_empty() {
            self.remotes = remotes;
        }
        self.vni = vni.or(self.vni);
        self.learn = learn.or(self.learn);
        self.nic = nic.or_else(|| self.nic.take());
        self.mtu = mtu.or(self.mtu);
        self.vlan = vlan.or(self.vlan);
        self.pcp = pcp.or(self.pcp);
        self.forged = forged.or(self.forged);
        self.congestion = congestion.or(self.congestion);
        self.fault = fault.or(self.fault);
    }
}
