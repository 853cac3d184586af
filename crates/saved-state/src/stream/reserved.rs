//! Numbers of removed fields and kinds, which are never used again, and the test that reads the list.

use super::kinds::{MODULES, kind_name};

/// Removed fields: module and name of the message, and their numbers.
const FIELDS: &[(&str, &[u32])] = &[];

/// Removed kinds of records.
const KINDS: &[u16] = &[];

/// The sources of the messages.
const SOURCES: [(&str, &str); 7] = [
    ("header", include_str!("header.rs")),
    ("pages", include_str!("../pages.rs")),
    ("pvrdma", include_str!("../pvrdma.rs")),
    ("roce", include_str!("../roce.rs")),
    ("rxe", include_str!("../rxe.rs")),
    ("vmxnet3", include_str!("../vmxnet3.rs")),
    ("work", include_str!("../work.rs")),
];

/// Returns the fields of a source: `module::Message` and number.
fn fields(module: &str, source: &str) -> Vec<(String, u32)> {
    let mut message = String::new();
    let mut found = Vec::new();
    for line in source.lines().map(str::trim) {
        let word = |keyword: &str| {
            let rest = line.split_once(keyword)?.1;
            rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()
        };
        if let Some(name) = word("struct ").or_else(|| word("enum ")).filter(|_| !line.starts_with("//")) {
            message = format!("{module}::{name}");
        }
        let numbers = ["tag = \"", "tags = \""].into_iter().find_map(|key| line.split_once(key));
        let numbers = numbers.and_then(|(_, rest)| rest.split_once('"')).map(|(numbers, _)| numbers);
        found.extend(
            numbers
                .into_iter()
                .flat_map(|numbers| numbers.split(','))
                .map(|number| (message.clone(), number.trim().parse().expect("a field number"))),
        );
    }
    found
}

fn reserved(fields: &[(String, u32)], list: &[(&str, &[u32])]) -> Vec<(String, u32)> {
    let is_reserved =
        |(message, number): &&(String, u32)| list.iter().any(|(name, gone)| name == message && gone.contains(number));
    fields.iter().filter(is_reserved).cloned().collect()
}

#[test]
fn a_removed_field_is_found() {
    let source = "/// The struct of this.\npub struct Qp {\n    #[prost(uint32, tag = \"1\")]\n    pub a: u32,\n\
                  #[prost(oneof = \"Op\", tags = \"2, 17\")]\n    pub op: Option<Op>,\n}\nstruct Mr {\n\
                  #[prost(message, optional, tag = \"3\")]\n}";
    let found = fields("rxe", source);
    let qp = |number| ("rxe::Qp".to_owned(), number);
    assert_eq!(found, [qp(1), qp(2), qp(17), ("rxe::Mr".to_owned(), 3)]);
    assert_eq!(reserved(&found, &[("rxe::Qp", &[3, 17]), ("rxe::Mr", &[1])]), [qp(17)]);
}

#[test]
fn numbers_of_removed_fields_and_kinds_are_not_used_again() {
    let fields: Vec<_> = SOURCES.iter().flat_map(|(module, source)| fields(module, source)).collect();
    assert!(fields.contains(&("header::HeaderMessage".to_owned(), 8)), "{fields:?}");
    assert_eq!(reserved(&fields, FIELDS), []);
    let kinds = MODULES.iter().flat_map(|module| module.records).map(|(kind, _)| *kind);
    assert_eq!(kinds.filter(|kind| KINDS.contains(kind)).collect::<Vec<_>>(), []);
}

#[test]
fn each_kind_is_used_once_and_in_the_range_of_its_module() {
    let mut kinds = Vec::new();
    for module in MODULES {
        for (kind, name) in module.records {
            assert_eq!(kind >> 8, u16::from(module.high), "{}::{name}", module.name);
            assert_eq!(kind_name(*kind), Some(format!("{}::{name}", module.name)));
            kinds.push(*kind);
        }
    }
    let all = kinds.len();
    kinds.sort_unstable();
    kinds.dedup();
    assert_eq!(kinds.len(), all);
    assert_eq!((kind_name(0), kind_name(0x02ff), kind_name(0xff01)), (None, None, None));
}
