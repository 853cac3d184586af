//! Virtual machine, as described by QEMU's command line.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

/// A command line of QEMU, parsed as far as the device depends on it.
#[derive(Clone, Debug, Default)]
pub(super) struct Machine {
    functions: Vec<Function>,
    /// Memory backends, and whether each is shared.
    memory: BTreeMap<String, bool>,
    /// Memory backends that the machine uses.
    used: Vec<String>,
    kvm: bool,
    incoming: bool,
}

/// A PCI function.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Function {
    driver: String,
    bus: String,
    slot: u32,
    pub(super) function: u32,
    pub(super) multifunction: bool,
    pub(super) mac: Option<String>,
    socket: Option<String>,
}

impl Machine {
    /// Parses a command line. Returns `None` if it is not one of QEMU for PCs.
    pub(super) fn of(words: &[String]) -> Option<Self> {
        // A loader or a wrapper may precede it.
        let at = words.iter().take(8).position(|word| {
            let name = word.rsplit('/').next().unwrap_or(word);
            name.starts_with("qemu-system-") || name == "qemu-kvm" || name == "kvm"
        })?;
        let mut machine = Self::default();
        let options = words.get(at..)?;
        for (index, option) in options.iter().enumerate() {
            let value = options.get(index.saturating_add(1)).map_or("", String::as_str);
            match option.trim_start_matches('-') {
                _ if !option.starts_with('-') => {}
                "device" => machine.functions.extend(Function::parse(value)),
                "object" => machine.take_object(value),
                "machine" | "M" | "numa" => machine.take_machine(value),
                "accel" => machine.kvm |= value.split(',').next() == Some("kvm"),
                "enable-kvm" => machine.kvm = true,
                "incoming" => machine.incoming = true,
                _ => {}
            }
        }
        Some(machine)
    }

    fn take_object(&mut self, value: &str) {
        let keys = keys(value, "qom-type");
        let kind = keys.get("qom-type").map_or("", String::as_str);
        if let (Some(id), Some(kind)) = (keys.get("id"), kind.strip_prefix("memory-backend-")) {
            // By default QEMU shares a memfd and no other memory.
            let shared = keys.get("share").map_or(kind == "memfd", |share| is_on(share));
            self.memory.insert(id.clone(), shared);
        }
    }

    fn take_machine(&mut self, value: &str) {
        let keys = keys(value, "type");
        self.kvm |= keys.get("accel").is_some_and(|accel| accel.split(':').next() == Some("kvm"));
        self.used.extend(["memory-backend", "memdev"].into_iter().filter_map(|key| keys.get(key).cloned()));
    }

    /// Returns the function that is served at this socket.
    pub(super) fn rdma_function(&self, socket: &Path) -> Option<&Function> {
        self.functions.iter().find(|function| function.socket.as_deref().is_some_and(|path| Path::new(path) == socket))
    }

    /// Returns the network function in the same slot.
    pub(super) fn function_zero(&self, of: &Function) -> Option<&Function> {
        self.functions.iter().find(|function| {
            (function.slot, function.function) == (of.slot, 0)
                && function.bus == of.bus
                && matches!(function.driver.as_str(), "vmxnet3" | "vfio-user-pci")
                && function.socket != of.socket
        })
    }

    /// Returns `true` if all its memory can be shared with the daemon.
    pub(super) fn has_shared_memory(&self) -> bool {
        !self.used.is_empty() && self.used.iter().all(|id| self.memory.get(id) == Some(&true))
    }

    pub(super) const fn uses_kvm(&self) -> bool {
        self.kvm
    }

    pub(super) const fn is_migrated(&self) -> bool {
        self.incoming
    }
}

impl Function {
    fn parse(value: &str) -> Option<Self> {
        let keys = keys(value, "driver");
        let text = |key: &str| keys.get(key).cloned();
        let address = text("addr")?;
        let (slot, function) = address.split_once('.').unwrap_or((&address, "0"));
        let number = |text: &str| u32::from_str_radix(text.trim_start_matches("0x"), 16).ok();
        Some(Self {
            driver: text("driver")?,
            bus: text("bus").unwrap_or_else(|| "pcie.0".to_owned()),
            slot: number(slot)?,
            function: number(function)?,
            multifunction: text("multifunction").is_some_and(|word| is_on(&word)),
            mac: text("mac"),
            socket: text("socket.path"),
        })
    }
}

fn is_on(word: &str) -> bool {
    matches!(word, "on" | "yes" | "true")
}

/// Parses the keys and values of an option: JSON, or `FIRST,key=value`, where `first` is the key of the first word.
fn keys(value: &str, first: &str) -> BTreeMap<String, String> {
    let mut keys = BTreeMap::new();
    if value.starts_with('{') {
        let object = serde_json::from_str::<Value>(value).unwrap_or_default();
        flatten("", &object, &mut keys);
        return keys;
    }
    for (index, word) in value.split(',').enumerate() {
        match word.split_once('=') {
            Some((key, value)) => keys.insert(key.to_owned(), value.to_owned()),
            None if index == 0 => keys.insert(first.to_owned(), word.to_owned()),
            None => None,
        };
    }
    keys
}

/// Collects the members of nested objects, with their names joined by dots.
fn flatten(prefix: &str, value: &Value, keys: &mut BTreeMap<String, String>) {
    let Value::Object(members) = value else {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        keys.insert(prefix.to_owned(), text);
        return;
    };
    for (name, member) in members {
        let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        flatten(&name, member, keys);
    }
}
