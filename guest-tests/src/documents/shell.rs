//! Parser for the subset of the shell that documents use: simple commands, word by word, without expansion.

/// Removes the prompts that say on which host a line is typed: `host1$ `, `host3# `, `$ `.
pub(super) fn without_prompts(script: &str) -> String {
    let mut lines: Vec<&str> = Vec::new();
    for line in script.lines() {
        let prompt = line.split_once(' ').filter(|(word, _)| {
            let name = word.trim_end_matches(['$', '#']);
            *word == "$" || name.len() + 1 == word.len() && !name.is_empty() && name.chars().all(is_name)
        });
        lines.push(prompt.map_or(line, |(_, rest)| rest));
    }
    lines.join("\n") + "\n"
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '-' || c == '_'
}

/// Returns the simple commands of a script. Words keep expansions as written; quotes are removed.
pub(super) fn commands(script: &str) -> Vec<Vec<String>> {
    let mut lexer = Lexer { rest: script, commands: vec![Vec::new()], word: None };
    while lexer.step() {}
    lexer.end_command();
    lexer.commands.iter_mut().for_each(remove_redirections);
    lexer.commands.retain(|words| !words.is_empty());
    lexer.commands
}

/// Removes redirections of input and output.
fn remove_redirections(words: &mut Vec<String>) {
    while let Some(at) = words.iter().position(|word| matches!(word.as_str(), ">" | ">>" | "<")) {
        words.drain(at..words.len().min(at + 2));
    }
}

struct Lexer<'a> {
    rest: &'a str,
    commands: Vec<Vec<String>>,
    /// Word that is being read.
    word: Option<String>,
}

impl Lexer<'_> {
    fn take(&mut self) -> Option<char> {
        let mut chars = self.rest.chars();
        let next = chars.next()?;
        self.rest = chars.as_str();
        Some(next)
    }

    fn push(&mut self, c: char) {
        self.word.get_or_insert_default().push(c);
    }

    fn end_word(&mut self) {
        if let (Some(word), Some(command)) = (self.word.take(), self.commands.last_mut()) {
            command.push(word);
        }
    }

    fn end_command(&mut self) {
        self.end_word();
        self.commands.push(Vec::new());
    }

    /// Reads one or more characters. Returns `false` at the end.
    fn step(&mut self) -> bool {
        let Some(c) = self.take() else { return false };
        match c {
            '\\' => {
                // A continued line, or an escaped character.
                if let Some(next) = self.take().filter(|next| *next != '\n') {
                    self.push(next);
                }
            }
            '\'' => self.quoted('\''),
            '"' => self.quoted('"'),
            '$' => self.expansion(),
            '#' if self.word.is_none() => {
                self.rest = self.rest.find('\n').map_or("", |end| &self.rest[end..]);
            }
            '\n' | ';' | '&' | '|' | '(' | ')' => self.end_command(),
            c if c.is_whitespace() => self.end_word(),
            c => self.push(c),
        }
        true
    }

    fn quoted(&mut self, quote: char) {
        // An empty pair of quotes is a word, too.
        self.word.get_or_insert_default();
        while let Some(c) = self.take() {
            match c {
                c if c == quote => return,
                '\\' if quote == '"' => {
                    if let Some(next) = self.take().filter(|next| *next != '\n') {
                        self.push(next);
                    }
                }
                '$' if quote == '"' => self.expansion(),
                c => self.push(c),
            }
        }
    }

    /// Reads `$name`, `${...}` or `$(...)`, which are kept as they are.
    fn expansion(&mut self) {
        self.push('$');
        let mut depth = 0_usize;
        while let Some(c) = self.rest.chars().next() {
            match c {
                '(' | '{' => depth += 1,
                ')' | '}' if depth == 0 => return,
                ')' | '}' => depth -= 1,
                c if depth == 0 && (c == '-' || !is_name(c)) => return,
                _ => {}
            }
            self.take();
            self.push(c);
            if depth == 0 && matches!(c, ')' | '}') {
                return;
            }
        }
    }
}
