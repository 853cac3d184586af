//! Permissions of a socket, as written on the command line and in the file.

use std::fmt;
use std::str::FromStr;

use pvrdma_vfio_user_server::socket::SocketAccess;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer};

use super::keys::deserialize_from_str;

/// Returns the permissions that these keys describe.
pub(super) fn access(owner: Option<UserId>, group: Option<GroupId>, mode: Option<Mode>) -> SocketAccess {
    SocketAccess {
        owner: owner.map(|UserId(id)| id),
        group: group.map(|GroupId(id)| id),
        mode: mode.map(|Mode(bits)| bits),
    }
}

/// Defines a user or a group: a string, or in the file also a number.
macro_rules! id {
    ($(#[doc = $doc:literal])+ $name:ident, $what:literal, $parse:ident) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub struct $name(pub u32);

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                SocketAccess::$parse(text).map(Self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = deserializer.deserialize_any(IdVisitor(concat!("the name or number of a ", $what)))?;
                text.parse().map_err(de::Error::custom)
            }
        }
    };
}

id! {
    /// A user of the host.
    UserId, "user", parse_owner
}

id! {
    /// A group of the host.
    GroupId, "group", parse_group
}

struct IdVisitor(&'static str);

impl Visitor<'_> for IdVisitor {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<String, E> {
        Ok(number.to_string())
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<String, E> {
        Ok(number.to_string())
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }
}

/// Permission bits in octal. In the file they are a string as well, because the numbers 660 and 0o660 would differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mode(pub u32);

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        SocketAccess::parse_mode(text).map(Self)
    }
}

deserialize_from_str!(Mode);
