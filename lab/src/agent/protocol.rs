//! Protocol between the host and the agent in a guest: one JSON object per line.

use serde::{Deserialize, Serialize};

/// Name of the virtio-serial port.
pub const PORT_NAME: &str = "guest-tests";

/// A message from the host.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Runs a shell command. Its output and its end are events with the same id.
    Spawn {
        /// Chosen by the host.
        id: u64,
        /// The script for `sh -c`.
        command: String,
    },
    /// Sends a signal to the process group of a command.
    Kill {
        /// The id of the command.
        id: u64,
    },
    /// Writes bytes to a file; ends with an exit event.
    Write {
        /// Chosen by the host.
        id: u64,
        /// The file, created when missing.
        path: String,
        /// Add to the end rather than replace.
        append: bool,
        /// Permission bits.
        mode: u32,
        /// The bytes, two digits each.
        hex: String,
    },
}

/// A message from the guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The agent has started: the guest is up, and no earlier command is running.
    Hello {
        /// Changes with every boot.
        boot: String,
    },
    /// A piece of a command's output, standard output and error in order of arrival.
    Output {
        /// The id of the command.
        id: u64,
        /// Text; bytes that are not valid UTF-8 are replaced.
        text: String,
    },
    /// A command has ended.
    Exit {
        /// The id of the command.
        id: u64,
        /// Exit code. 128 plus the number of a signal, as in a shell; -1 if the command could not be run.
        code: i32,
    },
}

/// Encodes bytes as hexadecimal digits.
pub fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: [char; 16] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f'];
    bytes.iter().flat_map(|&byte| [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]).collect()
}

/// Decodes hexadecimal digits; returns `None` if the text is invalid.
pub(crate) fn from_hex(text: &str) -> Option<Vec<u8>> {
    if !text.is_ascii() || !text.len().is_multiple_of(2) {
        return None;
    }
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_round_trip() {
        let bytes = [0, 1, 0x7f, 0xff];
        assert_eq!(to_hex(&bytes), "00017fff");
        assert_eq!(from_hex("00017fff").unwrap(), bytes);
        assert!(from_hex("0").is_none());
        assert!(from_hex("zz").is_none());
    }
}
