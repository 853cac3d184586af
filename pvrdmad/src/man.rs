//! Texts of the manual pages that are not part of the definition of the command line.

use std::fmt::Write;

use crate::config::reference::Section;

/// Examples by command. Each is a command line and its purpose.
pub(crate) const EXAMPLES: [(&str, &[(&str, &str)]); 15] = [
    (
        "pvrdmad",
        &[
            ("pvrdmad --config /etc/pvrdmad/pvrdmad.toml", "Serve the devices of a file."),
            (
                "pvrdmad --device name=vm0,socket=/run/pvrdmad/vm0.sock,mac=52:54:00:00:00:01",
                "Serve one device without a file.",
            ),
        ],
    ),
    (
        "pvrdmad-status",
        &[
            ("pvrdmad status", "Show the daemon, its networks and its devices."),
            ("pvrdmad status --check", "Print problems only; the status is 1 if there are any."),
        ],
    ),
    (
        "pvrdmad-show",
        &[
            ("pvrdmad show qp --device vm0", "Show the queue pairs of a device."),
            ("pvrdmad show failures --since 10m", "Show the queue pairs that failed in the last ten minutes."),
        ],
    ),
    ("pvrdmad-top", &[("pvrdmad top --device vm0 --interval 5", "Show rates of a device every five seconds.")]),
    (
        "pvrdmad-capture",
        &[
            ("pvrdmad capture --device vm0 -w vm0.pcapng --seconds 10", "Capture for ten seconds."),
            ("pvrdmad capture --device vm0 --qp 0x12 -w vm0.pcapng", "Capture the packets of a queue pair."),
        ],
    ),
    ("pvrdmad-add", &[("pvrdmad add name=vm9,socket=/run/pvrdmad/vm9.sock,mac=52:54:00:00:00:09", "Add a device.")]),
    ("pvrdmad-remove", &[("pvrdmad remove --device vm9", "Remove it again.")]),
    ("pvrdmad-link", &[("pvrdmad link down --device vm0", "Take the port of a device down.")]),
    ("pvrdmad-limits", &[("pvrdmad limits --device vm0 max_qp=1000", "Limit the queue pairs of the next driver.")]),
    ("pvrdmad-share", &[("pvrdmad share --device vm0 weight=300 max-rate=10G", "Change share and rate of a device.")]),
    ("pvrdmad-events", &[("pvrdmad events --since 1h --follow", "Print the events of the last hour, and new ones.")]),
    (
        "pvrdmad-check",
        &[
            ("pvrdmad check --config /etc/pvrdmad/pvrdmad.toml", "Check a file before a reload."),
            ("pvrdmad check --vms --json --config /etc/pvrdmad/pvrdmad.toml", "Print the findings as JSON."),
        ],
    ),
    ("pvrdmad-upgrade", &[("pvrdmad upgrade", "Replace the processes of all networks by the installed version.")]),
    ("pvrdmad-xml", &[("pvrdmad xml --device vm0 --into vm0.xml", "Add a device to a domain of libvirt.")]),
    ("pvrdmad-from-vmx", &[("pvrdmad from-vmx db1.vmx db2.vmx", "Make a configuration for VMs of ESXi.")]),
];

/// Files that each page names.
const FILES: [(&str, &str); 4] = [
    ("/etc/pvrdmad/pvrdmad.toml", "The configuration of the service."),
    ("/run/pvrdmad/control", "The control socket of the service."),
    ("/usr/share/doc/pvrdmad/", "Configuration, alerts, a dashboard, the schema of the control socket."),
    ("/usr/lib/systemd/system/pvrdmad.service", "The unit."),
];

/// Returns the sections that follow the generated page of a command.
pub(crate) fn sections(page: &str) -> String {
    let mut text = String::new();
    let examples = EXAMPLES.iter().find(|(name, _)| *name == page).map_or(&[][..], |(_, examples)| *examples);
    if !examples.is_empty() {
        text += ".SH EXAMPLES\n";
    }
    for (command, what) in examples {
        entry(&mut text, command, what);
    }
    text += ".SH FILES\n";
    for (path, what) in FILES {
        entry(&mut text, path, what);
    }
    let others = ["pvrdmad(1)", "pvrdmad.toml(5)", "pvrdma-guest-check(1)"];
    let others: Vec<_> = others.into_iter().filter(|other| *other != format!("{page}(1)")).collect();
    text + ".SH \"SEE ALSO\"\n" + &escaped(&others.join(", ")) + "\n"
}

/// Returns the page of the configuration file.
pub(crate) fn configuration(sections: &[Section]) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let mut text = format!(".TH pvrdmad.toml 5 \"\" \"pvrdmad {version}\"\n");
    text += ".SH NAME\npvrdmad.toml \\- configuration of pvrdmad\n.SH DESCRIPTION\n";
    text += "The file is TOML. Each VM has a [[device]], and devices of one network a common [[network]].\n";
    text += "Values of the command line replace those of the file.\n";
    for Section { title, keys } in sections {
        let _ = writeln!(text, ".SH \"{}\"", escaped(&title.to_uppercase()));
        for (key, what) in keys {
            entry(&mut text, key, what);
        }
    }
    let example = include_str!("../examples/one-host.toml").lines().filter(|line| !line.starts_with('#'));
    text += ".SH EXAMPLES\n.nf\n";
    example.for_each(|line| text += &(escaped(line) + "\n"));
    text + ".fi\n.SH FILES\n/etc/pvrdmad/pvrdmad.toml\n.SH \"SEE ALSO\"\npvrdmad(1)\n"
}

fn entry(text: &mut String, term: &str, what: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, ".TP\n\\fB{}\\fR\n{}", escaped(term), escaped(what));
}

/// Escapes text for roff: backslashes, hyphens that are no line breaks, and a control character at the begin of a line.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::cli::Cli;

    /// Each page has examples, and the command line accepts them.
    #[test]
    fn examples_are_accepted() {
        for (page, examples) in EXAMPLES {
            for (command, _) in examples {
                assert!(command.starts_with(&page.replacen('-', " ", 1)), "{page}: {command}");
                let parsed = Cli::try_parse_from(command.split(' '));
                assert!(parsed.is_ok(), "{command}: {}", parsed.unwrap_err());
            }
        }
        let commands = Cli::command();
        let shown = commands.get_subcommands().filter(|sub| !sub.is_hide_set()).map(|sub| sub.get_name().to_owned());
        let without = ["fault", "log-level"];
        for name in shown.filter(|name| !without.contains(&name.as_str())) {
            assert!(EXAMPLES.iter().any(|(page, _)| *page == format!("pvrdmad-{name}")), "{name}");
        }
    }

    #[test]
    fn nothing_is_taken_for_a_request_of_roff() {
        assert_eq!(escaped(".so /etc/passwd"), "\\&.so /etc/passwd");
        assert_eq!(escaped("a\\b --c"), "a\\eb \\-\\-c");
    }
}
