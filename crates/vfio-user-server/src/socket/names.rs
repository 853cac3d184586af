//! Names and IDs of users and groups, from the system's databases.

use nix::unistd::{Group, Uid, User};

/// Returns the ID of a user that is given by name or by ID.
///
/// # Errors
/// The user does not exist, or the databases cannot be read.
pub(super) fn user_id(text: &str) -> Result<u32, String> {
    id(text, "user", || Ok(User::from_name(text)?.map(|user| user.uid.as_raw())))
}

/// Returns the ID of a group that is given by name or by ID.
///
/// # Errors
/// The group does not exist, or the databases cannot be read.
pub(super) fn group_id(text: &str) -> Result<u32, String> {
    id(text, "group", || Ok(Group::from_name(text)?.map(|group| group.gid.as_raw())))
}

/// Returns a user's name, or the ID if it has none.
pub fn user(uid: u32) -> String {
    User::from_uid(Uid::from_raw(uid)).ok().flatten().map_or_else(|| uid.to_string(), |user| user.name)
}

fn id(text: &str, what: &str, by_name: impl FnOnce() -> nix::Result<Option<u32>>) -> Result<u32, String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // The largest ID means "unchanged" in system calls.
        return text
            .parse()
            .ok()
            .filter(|&id| id != u32::MAX)
            .ok_or_else(|| format!("{text} is not a {what}'s number"));
    }
    match by_name() {
        Ok(Some(id)) => Ok(id),
        Ok(None) => Err(format!("there is no {what} '{text}'")),
        Err(errno) => Err(format!("{what} '{text}': {errno}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers() {
        assert_eq!((user_id("root"), group_id("root")), (Ok(0), Ok(0)));
        assert_eq!((user_id("4242"), group_id("0")), (Ok(4242), Ok(0)));
        assert_eq!(user(0), "root");
        assert_eq!(user(u32::MAX - 7), (u32::MAX - 7).to_string());
        assert_eq!(user_id("4294967295"), Err("4294967295 is not a user's number".to_owned()));
        assert_eq!(group_id("99999999999"), Err("99999999999 is not a group's number".to_owned()));
        assert_eq!(user_id("no such user"), Err("there is no user 'no such user'".to_owned()));
        assert!(group_id("").is_err() && group_id("-1").is_err());
    }
}
