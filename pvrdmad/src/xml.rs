//! libvirt XML for a device.

use std::fmt::Write;

use serde_json::json;

use crate::status::DeviceReport;

/// The slot of both functions, as in the documents.
const SLOT: &str = "10";

/// Warning in the domain's metadata, for administrators.
const WARNING: &str = "do not migrate, save or snapshot the domain: QEMU does not refuse it";
const QEMU_NAMESPACE: &str = "xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'";
/// The driver in QEMU.
const DRIVER: &str = "vfio-user-pci";

/// Returns the parts of a libvirt domain that give it the device. libvirt has no element for vfio-user, so they contain
/// arguments for QEMU.
pub fn domain(device: &DeviceReport) -> String {
    let functions = Functions::of(device);
    let mut text = format!(
        "<!-- QEMU 10.1 or newer; {WARNING}. -->\n\
         <domain type='kvm' {QEMU_NAMESPACE}>\n  \
         <memoryBacking>\n    <source type='memfd'/>\n    <access mode='shared'/>\n  </memoryBacking>\n  \
         <qemu:commandline>\n",
    );
    if functions.nic.is_none() {
        let _ = writeln!(
            text,
            "    <!-- Function 0 of the slot must be a vmxnet3 with MAC {}; nic-socket= of the device serves one. -->",
            device.mac()
        );
    }
    functions.lines().for_each(|line| text += &(line + "\n"));
    text + "  </qemu:commandline>\n</domain>\n"
}

/// Merges the device into a domain as printed by `virsh dumpxml`. If the domain already has the device in that slot, it
/// is replaced, so merging twice has the same result as merging once. Everything else stays. libvirt keeps no comments,
/// so the warning becomes metadata.
///
/// # Errors
/// The text is not such a domain, or its memory is of a kind that QEMU cannot share.
pub fn merge(domain: &str, device: &DeviceReport) -> Result<String, String> {
    merged(domain, &Functions::of(device))
}

/// QEMU's options for the functions of a device.
struct Functions {
    nic: Option<String>,
    rdma: String,
}

impl Functions {
    fn of(device: &DeviceReport) -> Self {
        Self { nic: device.nic.as_ref().map(|nic| function(0, &nic.socket)), rdma: function(1, &device.socket) }
    }

    /// Returns two arguments of QEMU's command line for each function.
    fn lines(&self) -> impl Iterator<Item = String> {
        self.nic
            .iter()
            .chain([&self.rdma])
            .flat_map(|function| [ARGUMENT.to_owned(), format!("    <qemu:arg value='{}'/>", escaped(function))])
    }
}

/// The line before the argument of a device.
const ARGUMENT: &str = "    <qemu:arg value='-device'/>";

fn function(number: u8, socket: &str) -> String {
    let mut function = json!({
        "driver": DRIVER,
        "bus": "pcie.0",
        "addr": format!("{SLOT}.{number}"),
        "socket": { "path": socket, "type": "unix" },
    });
    if number == 0 {
        function["multifunction"] = true.into();
    }
    function.to_string()
}

fn merged(domain: &str, functions: &Functions) -> Result<String, String> {
    let mut lines: Vec<String> = domain.lines().map(str::to_owned).collect();
    let is_root = |line: &&mut String| line.starts_with("<domain ") && line.ends_with('>');
    let root = lines.iter_mut().find(is_root).ok_or("this is no domain as `virsh dumpxml` prints it")?;
    if !root.contains("xmlns:qemu=") {
        *root = root.replacen("<domain ", &format!("<domain {QEMU_NAMESPACE} "), 1);
    }
    lines.retain(|line| !line.contains("<pvrdma:warning "));
    remove_device(&mut lines);
    let warning = format!("    <pvrdma:warning xmlns:pvrdma='urn:pvrdma'>{WARNING}</pvrdma:warning>");
    put(&mut lines, "metadata", [warning])?;
    share_memory(&mut lines)?;
    put(&mut lines, "qemu:commandline", functions.lines())?;
    Ok(lines.join("\n") + "\n")
}

/// Removes the arguments of a device in the slot.
fn remove_device(lines: &mut Vec<String>) {
    let is_ours = |line: &String| {
        let line = line.replace("&quot;", "\"");
        let is_at = |number: u8| line.contains(&format!("\"addr\":\"{SLOT}.{number}\""));
        line.trim_start().starts_with("<qemu:arg ") && line.contains(DRIVER) && (is_at(0) || is_at(1))
    };
    while let Some(at) = lines.iter().position(is_ours) {
        lines.remove(at);
        // Removes the option in front of it, too.
        if at.checked_sub(1).and_then(|before| lines.get(before)).is_some_and(|line| line.contains("'-device'")) {
            lines.remove(at.saturating_sub(1));
        }
    }
}

/// Makes QEMU's memory a file that the daemon can map.
fn share_memory(lines: &mut Vec<String>) -> Result<(), String> {
    for (element, wanted, right) in [
        ("<source ", "<source type='memfd'/>", "type='memfd'"),
        ("<access ", "<access mode='shared'/>", "mode='shared'"),
    ] {
        let section = section(lines, "memoryBacking");
        let found = section.and_then(|(begin, end)| lines.get(begin..end)?.iter().find(|line| line.contains(element)));
        match found {
            Some(line) if line.contains(right) => {}
            Some(line) => return Err(format!("memoryBacking has {}, and needs {wanted}", line.trim())),
            None => put(lines, "memoryBacking", [format!("    {wanted}")])?,
        }
    }
    Ok(())
}

/// Returns the first and the last line of an element directly in the domain.
fn section(lines: &[String], name: &str) -> Option<(usize, usize)> {
    let begin = lines.iter().position(|line| *line == format!("  <{name}>"))?;
    let end = lines.iter().skip(begin).position(|line| *line == format!("  </{name}>"))?;
    Some((begin, begin.saturating_add(end)))
}

/// Adds lines at the end of an element, which is created at the end of the domain if there is none.
fn put(lines: &mut Vec<String>, name: &str, added: impl IntoIterator<Item = String>) -> Result<(), String> {
    let empty = format!("  <{name}/>");
    if let Some(at) = lines.iter().position(|line| *line == empty) {
        lines.remove(at);
    }
    let at = match section(lines, name) {
        Some((_, end)) => end,
        None => {
            let end = lines.iter().rposition(|line| line == "</domain>").ok_or("the domain has no end")?;
            lines.splice(end..end, [format!("  <{name}>"), format!("  </{name}>")]);
            end.saturating_add(1)
        }
    };
    lines.splice(at..at, added);
    Ok(())
}

/// Escapes text for an attribute in single quotes.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use pvrdma_verbs::testing::skipped;

    use super::*;

    /// A domain in libvirt's format, with an argument that is not for the device.
    const DOMAIN: &str = "\
<domain type='kvm' id='3'>
  <name>vm0</name>
  <metadata>
    <other:it xmlns:other='x'/>
  </metadata>
  <memory>1048576</memory>
  <os>
    <type>hvm</type>
  </os>
  <devices>
    <emulator>/usr/bin/qemu</emulator>
  </devices>
</domain>
";

    fn functions(folder: &str) -> Functions {
        let path = |name: &str| format!("{folder}/{name}");
        Functions { nic: Some(function(0, &path("nic0"))), rdma: function(1, &path("vm0")) }
    }

    #[test]
    fn merging_twice_is_merging_once() {
        let once = merged(DOMAIN, &functions("/run")).unwrap();
        roxmltree::Document::parse(&once).unwrap();
        assert_eq!(merged(&once, &functions("/run")).unwrap(), once);
        // libvirt writes other quotes, and keeps elements that it does not know.
        let printed =
            once.replace("{\"", "{&quot;").replace("\":\"", "&quot;:&quot;").replace("\",\"", "&quot;,&quot;");
        assert_eq!(merged(&printed, &functions("/run")).unwrap(), once);
        // A new socket replaces the old one.
        let moved = merged(&once, &functions("/other")).unwrap();
        assert_eq!((moved.matches(DRIVER).count(), moved.contains("/run/")), (2, false), "{moved}");
    }

    #[test]
    fn a_domain_keeps_its_elements_and_gets_the_warning() {
        let others = "  <qemu:commandline>\n    <qemu:arg value='-device'/>\n    <qemu:arg value='edu'/>\n  \
            </qemu:commandline>\n";
        let domain = DOMAIN.replace("</domain>", &format!("{others}</domain>"));
        let domain = domain.replace("<domain ", &format!("<domain {QEMU_NAMESPACE} "));
        let merged = merged(&domain, &functions("/run")).unwrap();
        let parsed = roxmltree::Document::parse(&merged).unwrap();
        assert!(domain.lines().all(|line| merged.lines().any(|other| other == line)), "{merged}");
        let warning = parsed.descendants().find(|node| node.has_tag_name(("urn:pvrdma", "warning"))).unwrap();
        assert_eq!(warning.text(), Some(WARNING));
        let backing = parsed.descendants().filter(|node| node.has_tag_name("memoryBacking")).count();
        let lines = parsed.descendants().filter(|node| node.tag_name().name() == "commandline").count();
        assert_eq!((backing, lines), (1, 1), "{merged}");
    }

    /// Checks domains with libvirt's schema, where it is installed.
    fn assert_valid(domains: &[String]) {
        const SCHEMA: &str = "/usr/share/libvirt/schemas/domain.rng";
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("xmllint");
        command.args(["--noout", "--relaxng", SCHEMA]).current_dir(folder.path());
        for (number, domain) in domains.iter().enumerate() {
            std::fs::write(folder.path().join(number.to_string()), domain).unwrap();
            command.arg(number.to_string());
        }
        match command.output() {
            Ok(output) if Path::new(SCHEMA).exists() => assert!(output.status.success(), "{output:?}"),
            _ => skipped("no xmllint, or no schema of libvirt"),
        }
    }

    /// Twelve domains, with each kind of memory beside each kind of options for QEMU. libvirt's schema accepts them.
    #[test]
    fn twelve_domains_are_merged_twice() {
        let backings = [
            "",
            "  <memoryBacking/>\n",
            "  <memoryBacking>\n    <hugepages/>\n  </memoryBacking>\n",
            "  <memoryBacking>\n    <source type='memfd'/>\n    <access mode='shared'/>\n  </memoryBacking>\n",
        ];
        let arg = |word: &str| format!("    <qemu:arg value='{word}'/>\n");
        let options = |words: &[&str]| {
            let lines: String = words.iter().map(|word| arg(word)).collect();
            format!("  <qemu:commandline>\n{lines}  </qemu:commandline>\n")
        };
        // Another device of the same driver stays.
        let other = "{\"driver\":\"vfio-user-pci\",\"bus\":\"pcie.0\",\"addr\":\"11.0\"}".replace('"', "&quot;");
        let commands = [String::new(), options(&["-cpu", "host"]), options(&["-device", &other])];
        let mut all = Vec::new();
        for backing in backings {
            for command in &commands {
                let own = if command.is_empty() { String::new() } else { format!("{QEMU_NAMESPACE} ") };
                let domain = DOMAIN.replace("<domain ", &format!("<domain {own}"));
                let domain = domain.replace("</domain>", &format!("{backing}{command}</domain>"));
                let once = merged(&domain, &functions("/run")).unwrap();
                assert_eq!(merged(&once, &functions("/run")).unwrap(), once);
                assert_eq!((once.matches(WARNING).count(), once.matches("memfd").count()), (1, 1), "{once}");
                assert!(command.lines().all(|line| once.contains(line)), "{once}");
                all.push(once);
            }
        }
        assert_eq!(all.len(), 12);
        assert_valid(&all);
    }

    #[test]
    fn memory_that_cannot_be_shared_is_refused() {
        let backed = |inside: &str| {
            let backing = format!("  <memoryBacking>\n    {inside}\n  </memoryBacking>\n</domain>");
            merged(&DOMAIN.replace("</domain>", &backing), &functions("/run"))
        };
        assert!(backed("<source type='anonymous'/>").unwrap_err().contains("<source type='memfd'/>"));
        assert!(backed("<access mode='private'/>").is_err());
        let kept = backed("<hugepages/>").unwrap();
        assert!(kept.contains("<hugepages/>") && kept.matches("memfd").count() == 1, "{kept}");
        assert!(merged("<network>\n</network>\n", &functions("/run")).is_err());
    }

    #[test]
    fn attributes_are_escaped() {
        assert_eq!(escaped("a'b<c>&d\"e"), "a&apos;b&lt;c&gt;&amp;d\"e");
    }
}
