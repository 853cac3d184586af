//! Configuration for virtual machines that leave ESXi, made from their VMX files.
//!
//! A VMX file is text with a line `key = "value"` for each setting. Its PVRDMA adapter is a network adapter with both
//! functions, so it becomes one device with a `nic-socket`. Files come from other hosts and are not trusted: names
//! become names of the configuration, and all other text goes into comments without control characters.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::io::Read;
use std::path::Path;
use std::{fs, io};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pvrdma_packet::MacAddr;

use crate::config::{Mac, NAME_LENGTH};
use crate::text::printable_text;

/// Most bytes of a file.
const MAX_FILE: u64 = 1 << 20;

/// Most network adapters of a virtual machine.
const MAX_ADAPTERS: u32 = 64;

/// Values of `virtualDev` for a PVRDMA adapter.
const PVRDMA: [&str; 3] = ["pvrdma", "vrdma", "vmxnet3vrdma"];

/// First hardware version with a PVRDMA adapter.
const FIRST_HARDWARE: u32 = 13;

/// Settings of a virtual machine. Keys are in lower case.
#[derive(Debug)]
pub struct Vmx {
    /// Name of the file, for comments.
    file: String,
    settings: BTreeMap<String, String>,
}

/// A network adapter that becomes a device.
struct Adapter {
    key: String,
    mac: MacAddr,
    port_group: String,
    starts_connected: bool,
}

impl Vmx {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or is not a VMX file.
    pub fn read(path: &Path) -> Result<Self> {
        let read = || -> io::Result<String> {
            let mut text = String::new();
            // A byte more than allowed shows that the file is too long.
            fs::File::open(path)?.take(MAX_FILE + 1).read_to_string(&mut text)?;
            Ok(text)
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let text = read().with_context(|| path.display().to_string())?;
        Self::parse(&name, &text).with_context(|| path.display().to_string())
    }

    /// Parses the text of a file of this name.
    ///
    /// # Errors
    /// It is not a VMX file.
    pub fn parse(file: &str, text: &str) -> Result<Self> {
        ensure!(text.len() as u64 <= MAX_FILE, "a VMX file has at most {MAX_FILE} bytes");
        let mut settings = BTreeMap::new();
        for (number, line) in (1_usize..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let setting = line.split_once('=').and_then(|(key, value)| Some((key.trim(), unquoted(value.trim())?)));
            let Some((key, value)) = setting else { bail!("line {number} is not KEY = \"VALUE\"") };
            settings.insert(key.to_lowercase(), value);
        }
        ensure!(settings.contains_key("virtualhw.version"), "there is no virtualHW.version: it is not a VMX file");
        Ok(Self { file: printable_text(file), settings })
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.settings.get(key).map(String::as_str)
    }

    fn is_true(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| value.eq_ignore_ascii_case("true"))
    }

    /// Returns the hardware version, 0 if it is not a number.
    fn hardware(&self) -> u32 {
        self.get("virtualhw.version").and_then(|version| version.parse().ok()).unwrap_or(0)
    }

    /// Returns `true` if all memory of the guest is reserved.
    fn reserves_memory(&self) -> bool {
        let size = self.get("memsize");
        self.is_true("sched.mem.pin") || size.is_some_and(|size| self.get("sched.mem.min") == Some(size))
    }

    /// Returns adapters that exist, with their types.
    fn present(&self) -> impl Iterator<Item = (String, &str)> {
        let keys = (0..MAX_ADAPTERS).map(|number| format!("ethernet{number}"));
        keys.filter(|key| self.is_true(&format!("{key}.present")))
            .map(|key| (self.get(&format!("{key}.virtualdev")).unwrap_or("e1000"), key))
            .map(|(kind, key)| (key, kind))
    }

    /// Returns the adapters that become devices: those of the type PVRDMA, or the one that was named.
    ///
    /// # Errors
    /// There is none, or one without a MAC address.
    fn adapters(&self, named: Option<&str>) -> Result<Vec<Adapter>> {
        let is_wanted = |key: &str, kind: &str| match named {
            Some(named) => named.eq_ignore_ascii_case(key),
            None => PVRDMA.iter().any(|word| word.eq_ignore_ascii_case(kind)),
        };
        let wanted: Vec<_> = self.present().filter(|(key, kind)| is_wanted(key, kind)).map(|(key, _)| key).collect();
        if wanted.is_empty() {
            let others: Vec<_> = self.present().map(|(key, kind)| format!("{key} {}", printable_text(kind))).collect();
            let others = if others.is_empty() { "none".to_owned() } else { others.join(", ") };
            bail!("no PVRDMA adapter; --adapter takes another one (adapters: {others})");
        }
        wanted.into_iter().map(|key| self.adapter(key)).collect()
    }

    fn adapter(&self, key: String) -> Result<Adapter> {
        let of = |name: &str| self.get(&format!("{key}.{name}")).filter(|value| !value.is_empty());
        // A static address has precedence: the generated one is left over from before.
        let mac = of("address").or_else(|| of("generatedaddress"));
        let mac = mac.with_context(|| format!("{key} has no MAC address yet: start the VM once, or set one"))?;
        let Mac(mac) = mac.parse().map_err(|error| anyhow!("{key}: {error}"))?;
        let port_group = of("networkname").or_else(|| of("dvs.portgroupid")).or_else(|| of("opaquenetwork.id"));
        let port_group = port_group.unwrap_or("default").to_owned();
        let starts_connected = of("startconnected").is_none_or(|value| !value.eq_ignore_ascii_case("false"));
        Ok(Adapter { key, mac, port_group, starts_connected })
    }

    /// Returns comments about the settings that the configuration does not take over.
    fn notes(&self, adapters: &[Adapter]) -> Vec<String> {
        let mut notes = Vec::new();
        if let Some(size) = self.get("memsize") {
            let size = printable_text(size);
            notes.push(format!("memory: {size} MiB; QEMU: memory-backend-memfd,size={size}M,share=on"));
        }
        let own = |key: &str| adapters.iter().any(|adapter| adapter.key == key);
        for (key, kind) in self.present().filter(|(key, _)| !own(key)) {
            notes.push(format!("{key} ({}) is not converted: give it to QEMU as it is", printable_text(kind)));
        }
        if self.settings.keys().any(|key| key.starts_with("pcipassthru") && self.is_true(key)) {
            notes.push("PCI passthrough is not converted: VFIO of QEMU".to_owned());
        }
        if self.hardware() < FIRST_HARDWARE {
            let version = self.get("virtualhw.version").unwrap_or_default();
            notes.push(format!("hardware version {} has no PVRDMA adapter on ESXi", printable_text(version)));
        }
        notes
    }
}

/// Returns the value of a setting without quotes, and with its escaped characters (`|22` is a quote). `None` if it is
/// not quoted.
fn unquoted(value: &str) -> Option<String> {
    let inside = value.strip_prefix('"')?.strip_suffix('"')?;
    let mut parts = inside.split('|');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok()).filter(u8::is_ascii);
        match (code, part.get(2..)) {
            (Some(code), Some(rest)) => {
                text.push(char::from(code));
                text.push_str(rest);
            }
            _ => {
                text.push('|');
                text.push_str(part);
            }
        }
    }
    Some(text)
}

/// Names of a configuration, each given once.
#[derive(Default)]
struct Names(BTreeSet<String>);

impl Names {
    /// Returns a name for this text that is not in use.
    fn make(&mut self, text: &str) -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '_' | '.') { c } else { '-' };
        let words: String = text.to_lowercase().chars().map(plain).take(NAME_LENGTH - 4).collect();
        let words = words.trim_matches(['-', '.']);
        let base = if words.is_empty() { "vm" } else { words };
        let more = (2_u32..).map(|number| format!("{base}-{number}"));
        let free = std::iter::once(base.to_owned()).chain(more).find(|name| !self.0.contains(name));
        let name = free.unwrap_or_default();
        self.0.insert(name.clone());
        name
    }
}

/// Returns a configuration for these virtual machines. `named` is the adapter that becomes a device, by default those
/// of the type PVRDMA. `folder` is for the sockets.
///
/// # Errors
/// A virtual machine has no such adapter, or an adapter has no MAC address.
pub fn configuration(machines: &[Vmx], named: Option<&str>, folder: &str) -> Result<String> {
    let (mut names, mut networks) = (Names::default(), BTreeMap::<String, String>::new());
    let (mut network_names, mut devices) = (Names::default(), String::new());
    for vmx in machines {
        let adapters = vmx.adapters(named).with_context(|| vmx.file.clone())?;
        let title = vmx.get("displayname").unwrap_or(&vmx.file);
        let _ = writeln!(devices, "\n# {}: {}", vmx.file, printable_text(title));
        for note in vmx.notes(&adapters) {
            let _ = writeln!(devices, "# {note}.");
        }
        for adapter in &adapters {
            let group = &adapter.port_group;
            let network = networks.entry(group.clone()).or_insert_with(|| network_names.make(group)).clone();
            devices += &device(vmx, adapter, (&names.make(title), &network), folder);
        }
    }
    let mut text = "# Made from VMX files by pvrdmad from-vmx: see docs/esxi.md.\n".to_owned();
    for (group, name) in &networks {
        let _ = write!(
            text,
            "\n# Port group {}: set its uplink if its VMs are on several hosts.\n[[network]]\nname = \"{name}\"\n\
             # uplink = \"af_packet:IFACE\"\n",
            printable_text(group)
        );
    }
    Ok(text + &devices)
}

/// Returns the section of a device.
fn device(vmx: &Vmx, adapter: &Adapter, (name, network): (&str, &str), folder: &str) -> String {
    let Adapter { key, mac, starts_connected, .. } = adapter;
    let folder = folder.trim_end_matches('/');
    let mut text = format!("# {key}, hardware version {}.\n[[device]]\n", vmx.hardware());
    // Names and MAC addresses need no escapes.
    let _ = writeln!(text, "name = \"{name}\"\nnetwork = \"{network}\"\nmac = \"{mac}\"");
    for (key, file) in [("socket", "sock"), ("nic-socket", "nic.sock")] {
        let _ = writeln!(text, "{key} = {}", toml::Value::from(format!("{folder}/{name}.{file}")));
    }
    if vmx.reserves_memory() {
        text += "# All memory of the guest is reserved.\npin = \"all\"\n";
    }
    if !starts_connected {
        let _ = writeln!(text, "# It is not connected at power on: pvrdmad link down --device {name}");
    }
    text
}
