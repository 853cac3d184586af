//! The command as a script for the guest's shell, with its environment variables.

use std::net::Ipv4Addr;
use std::path::Path;

use anyhow::{Result, bail};

/// Information about its guest that a command gets.
#[derive(Clone, Debug)]
pub(super) struct Surroundings<'a> {
    /// Number of the guest, from 0 on.
    pub(super) number: usize,
    /// Addresses of all guests.
    pub(super) addresses: &'a [Ipv4Addr],
    /// Name of the RDMA device.
    pub(super) device: &'a str,
    /// Index of the GID that its address has.
    pub(super) gid_index: u32,
}

/// Returns the additional variables that the caller requests.
///
/// # Errors
/// A name is invalid, or the variable is not set here.
pub(super) fn variables(given: &[String]) -> Result<Vec<(String, String)>> {
    let variable = |text: &String| {
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (text.as_str(), std::env::var(text).ok()),
        };
        let plain = |c: char| c == '_' || c.is_ascii_alphanumeric();
        if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) || !name.chars().all(plain) {
            bail!("--env {text}: '{name}' is no name of a variable");
        }
        match value {
            Some(value) => Ok((name.to_owned(), value)),
            None => bail!("--env {name}: it is not set here; give it as {name}=VALUE"),
        }
    };
    given.iter().map(variable).collect()
}

/// Returns a script that execs the command.
pub(super) fn script(
    around: &Surroundings<'_>,
    variables: &[(String, String)],
    folder: &Path,
    command: &[String],
) -> String {
    let mut script = format!("cd {} || exit\n", quoted(&folder.to_string_lossy()));
    for (name, value) in own_variables(around).iter().chain(variables) {
        script.push_str(&format!("export {name}={}\n", quoted(value)));
    }
    let words: Vec<_> = command.iter().map(|word| quoted(word)).collect();
    script + "exec " + &words.join(" ")
}

/// Returns the variables of the lab: [docs/ci.md](../../../docs/ci.md) lists them.
pub(super) fn own_variables(around: &Surroundings<'_>) -> Vec<(String, String)> {
    let own = around.addresses.get(around.number).map(ToString::to_string).unwrap_or_default();
    let all: Vec<_> = around.addresses.iter().map(ToString::to_string).collect();
    let peers: Vec<_> = all.iter().filter(|address| **address != own).cloned().collect();
    [
        ("NUMBER", around.number.to_string()),
        ("VMS", all.len().to_string()),
        ("ADDRESS", own),
        ("ADDRESSES", all.join(" ")),
        ("PEERS", peers.join(" ")),
        ("DEVICE", around.device.to_owned()),
        ("GID_INDEX", around.gid_index.to_string()),
        ("INTERFACE", "eth0".to_owned()),
    ]
    .map(|(name, value)| (format!("PVRDMA_LAB_{name}"), value))
    .to_vec()
}

/// Quotes a word for the shell.
pub(super) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const ADDRESSES: [Ipv4Addr; 3] =
        [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2), Ipv4Addr::new(10, 0, 0, 3)];

    fn around(number: usize) -> Surroundings<'static> {
        Surroundings { number, addresses: &ADDRESSES, device: "vmw_pvrdma0", gid_index: 3 }
    }

    #[test]
    fn the_shell_takes_words_as_they_are() {
        let folder = tempfile::Builder::new().prefix("it's $HOME ").tempdir().unwrap();
        let command = ["printf", "%s|", "a b", "$HOME", "it's", "`x`", "", "\\"].map(str::to_owned);
        let variables = [("SAID".to_owned(), "'; exit 7 #".to_owned())];
        let run = |command: &[String]| {
            let text = script(&around(1), &variables, folder.path(), command);
            let output = Command::new("sh").args(["-c", &text]).output().unwrap();
            assert!(output.status.success(), "{text}: {output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        assert_eq!(run(&command), "a b|$HOME|it's|`x`||\\|");
        let echo = "pwd; echo $PVRDMA_LAB_NUMBER/$PVRDMA_LAB_VMS $PVRDMA_LAB_ADDRESS: $PVRDMA_LAB_PEERS, $SAID";
        let said = run(&["sh", "-c", echo].map(str::to_owned));
        assert_eq!(said, format!("{}\n1/3 10.0.0.2: 10.0.0.1 10.0.0.3, '; exit 7 #\n", folder.path().display()));
    }

    #[test]
    fn variables_of_the_caller() {
        let given = |text: &str| variables(&[text.to_owned()]).map_err(|error| error.to_string());
        assert_eq!(given("A=b=c"), Ok(vec![("A".to_owned(), "b=c".to_owned())]));
        assert_eq!(given("PATH").unwrap()[0].1, std::env::var("PATH").unwrap());
        assert!(given("1A=b").unwrap_err().contains("no name of a variable"));
        assert!(given("A;reboot=1").unwrap_err().contains("no name of a variable"));
        assert!(given("THIS_IS_NOT_SET_HERE").unwrap_err().contains("not set here"));
    }

    /// The document that defines the variables lists each of them.
    #[test]
    fn the_document_lists_the_variables() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/ci.md");
        let page = std::fs::read_to_string(page).unwrap();
        for (name, _) in own_variables(&around(0)) {
            assert!(page.contains(&format!("| `{name}` |")), "{name}");
        }
    }
}
