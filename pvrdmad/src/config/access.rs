//! Who may connect to a socket.

use std::fmt;
use std::str::FromStr;

use nix::unistd::{Group, User};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::keys::deserialize_from_str;

/// Who may connect to a socket: what is not given stays as the daemon makes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SocketAccess {
    /// User that owns it.
    pub owner: Option<u32>,
    /// Group that owns it.
    pub group: Option<u32>,
    /// Permission bits.
    pub mode: Option<u32>,
}

/// A user or a group, by number or by the name that the host knows it by.
macro_rules! id {
    ($(#[doc = $doc:literal])+ $name:ident, $what:literal, $table:ident, $field:ident) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub struct $name(pub u32);

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                if let Ok(number) = text.parse::<u64>() {
                    return Self::try_from(number);
                }
                match $table::from_name(text) {
                    Ok(Some(entry)) => Ok(Self(entry.$field.as_raw())),
                    Ok(None) => Err(format!(concat!("there is no ", $what, " '{}' on this host"), text)),
                    Err(error) => Err(format!(concat!("cannot look the ", $what, " '{}' up: {}"), text, error)),
                }
            }
        }

        impl TryFrom<u64> for $name {
            type Error = String;

            fn try_from(number: u64) -> Result<Self, String> {
                // The largest means "nobody" to chown.
                let id = u32::try_from(number).ok().filter(|&id| id != u32::MAX);
                id.map(Self).ok_or_else(|| format!(concat!("{} is not the number of a ", $what), number))
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(IdVisitor(concat!("the name or number of a ", $what))).and_then(|id| {
                    match id {
                        Id::Name(name) => name.parse(),
                        Id::Number(number) => Self::try_from(number),
                    }
                    .map_err(de::Error::custom)
                })
            }
        }
    };
}

id! {
    /// A user of the host.
    UserId, "user", User, uid
}

id! {
    /// A group of the host.
    GroupId, "group", Group, gid
}

/// What the file or the command line gives.
enum Id {
    Name(String),
    Number(u64),
}

struct IdVisitor(&'static str);

impl Visitor<'_> for IdVisitor {
    type Value = Id;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Id, E> {
        u64::try_from(number).map(Id::Number).map_err(|_| E::custom(format!("{number} is not {}", self.0)))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Id, E> {
        Ok(Id::Number(number))
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<Id, E> {
        Ok(Id::Name(name.to_owned()))
    }
}

/// Permission bits, written in octal. A string in the file, too: there 660 and 0o660 would be two numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mode(pub u32);

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bits = Some(text).filter(|text| text.bytes().all(|digit| digit.is_ascii_digit()));
        let mode = bits.and_then(|text| u32::from_str_radix(text, 8).ok()).filter(|&mode| mode <= 0o777);
        mode.map(Self).ok_or_else(|| format!("'{text}' is not a mode of 0 to 777, in octal"))
    }
}

deserialize_from_str!(Mode);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!("660".parse(), Ok(Mode(0o660)));
        assert_eq!("0600".parse(), Ok(Mode(0o600)));
        for wrong in ["", "rw", "888", "1777", "+6", "-6", "77777777777"] {
            assert!(wrong.parse::<Mode>().unwrap_err().contains("octal"), "{wrong}");
        }
        assert_eq!(("root".parse(), "1000".parse()), (Ok(UserId(0)), Ok(UserId(1000))));
        assert_eq!(("root".parse(), "0".parse()), (Ok(GroupId(0)), Ok(GroupId(0))));
        assert!("nobody-of-this-name".parse::<UserId>().unwrap_err().contains("no user"));
        assert!("nobody-of-this-name".parse::<GroupId>().unwrap_err().contains("no group"));
        for wrong in ["4294967295", "4294967296"] {
            assert!(wrong.parse::<UserId>().unwrap_err().contains("number of a user"), "{wrong}");
        }
    }
}
