//! Access rights of a socket.

use serde::{Deserialize, Serialize};

use super::names::{group_id, user_id};

/// Users that may connect to a socket or send to it: owner, group and mode of its file. Absent fields default to the
/// process's own user and group, and to mode 600, or 660 if there is a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SocketAccess {
    /// ID of the user that owns the file.
    pub owner: Option<u32>,
    /// ID of its group.
    pub group: Option<u32>,
    /// Permission bits, at most 0o777. Only the write bits matter for connecting.
    pub mode: Option<u32>,
}

impl SocketAccess {
    /// Parses an owner: a user's name or ID.
    ///
    /// # Errors
    /// The user does not exist.
    pub fn parse_owner(text: &str) -> Result<u32, String> {
        user_id(text)
    }

    /// Parses a group: its name or ID.
    ///
    /// # Errors
    /// The group does not exist.
    pub fn parse_group(text: &str) -> Result<u32, String> {
        group_id(text)
    }

    /// Parses permission bits: up to four octal digits, at most 777.
    ///
    /// # Errors
    /// The text is not such a number.
    pub fn parse_mode(text: &str) -> Result<u32, String> {
        let octal = (1..=4).contains(&text.len()) && text.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
        let mode = octal.then(|| u32::from_str_radix(text, 8).ok()).flatten();
        mode.filter(|&mode| mode <= 0o777).ok_or_else(|| format!("mode '{text}' is not octal, at most 777"))
    }

    /// Returns the permission bits of the file.
    pub fn permissions(&self) -> u32 {
        let default = if self.group.is_some() { 0o660 } else { 0o600 };
        // Set-user-ID and similar bits have no effect on a socket.
        self.mode.unwrap_or(default) & 0o777
    }

    /// Returns `true` if users other than the process's own may use the socket.
    pub(super) fn is_shared(&self) -> bool {
        self.owner.is_some() || self.group.is_some() || self.permissions() & 0o077 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!((SocketAccess::parse_owner("root"), SocketAccess::parse_group("7")), (Ok(0), Ok(7)));
        for (text, mode) in [("600", 0o600), ("0660", 0o660), ("0", 0)] {
            assert_eq!(SocketAccess::parse_mode(text), Ok(mode));
        }
        for wrong in ["", "rw", "999", "+60", "1777", "00600", "-1"] {
            assert!(SocketAccess::parse_mode(wrong).unwrap_err().contains("octal"), "{wrong}");
        }
    }

    #[test]
    fn modes() {
        let access = SocketAccess::default();
        assert_eq!((access.permissions(), access.is_shared()), (0o600, false));
        let access = SocketAccess { group: Some(7), ..access };
        assert_eq!((access.permissions(), access.is_shared()), (0o660, true));
        let access = SocketAccess { mode: Some(0o4600), ..access };
        assert_eq!((access.permissions(), access.is_shared()), (0o600, true));
        let access = SocketAccess { group: None, mode: Some(0o620), owner: None };
        assert!(access.is_shared());
        assert_eq!(serde_json::from_str::<SocketAccess>(&serde_json::to_string(&access).unwrap()).unwrap(), access);
    }
}
