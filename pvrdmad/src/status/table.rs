//! Tables that fit a terminal of 80 columns.

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};

/// Characters in a line.
const WIDTH: u16 = 80;

/// Longest name of a device in a table.
const NAME: usize = 12;

/// A line below the header only, so that many rows fit a screen.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// Renders a table whose columns from `first_number` on contain numbers.
pub(super) fn table<I: IntoIterator<Item = T>, T: Into<String>>(
    header: I,
    first_number: usize,
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    let mut table = Table::new();
    table.load_style(STYLE).set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH);
    table.set_header(header.into_iter().map(Into::into).collect::<Vec<String>>());
    table.add_rows(rows);
    if table.is_empty() {
        return String::new();
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 1));
    }
    for column in table.column_iter_mut().skip(first_number) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{table}\n")
}

/// Shortens a long name of a device.
pub(super) fn short(name: &str) -> String {
    match name.char_indices().nth(NAME) {
        None => name.to_owned(),
        Some(_) => name.chars().take(NAME - 1).chain(['…']).collect(),
    }
}

/// Renders a ratio as a percentage.
pub(super) fn percent(part: u64, whole: u64) -> String {
    let tenths = u128::from(part) * 1000 / u128::from(whole.max(1));
    format!("{}.{} %", tenths / 10, tenths % 10)
}

/// Renders a number of bytes with a unit.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0..0x400 => format!("{bytes} B"),
        0x400..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{}.{} GiB", bytes >> 30, (bytes >> 20 & 0x3ff) * 10 / 0x400),
    }
}

/// Renders a count.
pub(super) fn number(count: u64) -> String {
    match count {
        0..100_000 => count.to_string(),
        100_000..100_000_000 => format!("{} k", count / 1000),
        _ => format!("{} M", count / 1_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(
            [0, 1023, 4096, 512 << 20, 6 << 30, (3 << 30) + (1 << 29)].map(size),
            ["0 B", "1023 B", "4 KiB", "512 MiB", "6.0 GiB", "3.5 GiB"]
        );
        assert_eq!([99_999, 100_000, 1_234_567_890].map(number), ["99999", "100 k", "1234 M"]);
        assert_eq!([short("vm0"), short("a-very-long-name")], ["vm0", "a-very-long…"]);
    }
}
