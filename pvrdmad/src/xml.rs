//! What libvirt has to be told of a device.

use std::fmt::Write;

use serde_json::json;

use crate::status::DeviceReport;

/// The slot of both functions, as the documents have it.
const SLOT: &str = "10";

/// The parts of a libvirt domain that give it the device. libvirt has no word for vfio-user, so that QEMU is told
/// itself.
pub fn domain(device: &DeviceReport) -> String {
    let function = |number: u8, socket: &str| {
        let mut function = json!({
            "driver": "vfio-user-pci",
            "bus": "pcie.0",
            "addr": format!("{SLOT}.{number}"),
            "socket": { "path": socket, "type": "unix" },
        });
        if number == 0 {
            function["multifunction"] = true.into();
        }
        function.to_string()
    };
    let mut text = String::from(
        "<!-- QEMU 10.1 or newer; do not migrate, save or snapshot the domain: QEMU does not \
         refuse it. -->\n\
         <domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\n  \
         <memoryBacking>\n    <source type='memfd'/>\n    <access mode='shared'/>\n  </memoryBacking>\n  \
         <qemu:commandline>\n",
    );
    match &device.nic {
        Some(nic) => argument(&mut text, &function(0, &nic.socket)),
        None => {
            let _ = writeln!(
                text,
                "    <!-- Function 0 of the slot must be a vmxnet3 with MAC {}; nic-socket= of the device serves one. -->",
                device.mac()
            );
        }
    }
    argument(&mut text, &function(1, &device.socket));
    text + "  </qemu:commandline>\n</domain>\n"
}

/// Two arguments of QEMU's command line.
fn argument(text: &mut String, device: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "    <qemu:arg value='-device'/>\n    <qemu:arg value='{}'/>", escaped(device));
}

/// Text as an attribute in single quotes has it.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_holds_what_it_is_given() {
        assert_eq!(escaped("a'b<c>&d\"e"), "a&apos;b&lt;c&gt;&amp;d\"e");
    }
}
