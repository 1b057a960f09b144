"""Small recurrent networks for the coverage benchmark: speech, text and tagging."""

from typing import Any


def recurrent(name: str) -> Any:
    from torch import nn

    class Speech(nn.Module):
        """Convolutions over time, a GRU, and scores of letters for every time step."""

        def __init__(self) -> None:
            super().__init__()
            self.front = nn.Sequential(
                nn.Conv1d(16, 32, 5, stride=2, padding=2),
                nn.BatchNorm1d(32),
                nn.ReLU(),
                nn.Conv1d(32, 24, 3, padding=1),
                nn.BatchNorm1d(24),
                nn.ReLU(),
            )
            self.gru = nn.GRU(24, 32, num_layers=2, batch_first=True)
            self.head = nn.Linear(32, 29)

        def forward(self, x: Any) -> Any:
            return self.head(self.gru(self.front(x).transpose(1, 2))[0])

    class Words(nn.Module):
        """An LSTM over words: one output for each text, or for each word if it is bidirectional."""

        def __init__(self, both_ways: bool) -> None:
            super().__init__()
            self.both_ways = both_ways
            self.embed = nn.Embedding(99, 24)
            self.lstm = nn.LSTM(24, 32, batch_first=True, bidirectional=both_ways)
            self.hidden = nn.Linear(64 if both_ways else 32, 48)
            self.head = nn.Linear(48, 7)

        def forward(self, x: Any) -> Any:
            steps, (last, _) = self.lstm(self.embed(x))
            return self.head(self.hidden(steps if self.both_ways else last[-1]).relu())

    return Speech() if name == "gru_speech" else Words(both_ways=name == "lstm_tagger")
