// A shop without the SDK, in Go 1.21 or later, with the standard library alone: half, commit, check, consume.
//
//	go run shop.go http://127.0.0.1:7400 DIRECTORY
//
// Its database is a directory. A file is created once, and whole, or not at all: that is the local transaction. In your
// service it is a transaction of your database that inserts a row with the id of Notify's transaction beside the order.
package main

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"
)

const (
	group = "shop-go"
	topic = "order.placed.go"
)

var url, directory string

type object = map[string]any

// request asks the server; answer may be nil.
func request(method, path string, body, answer any) error {
	encoded, err := json.Marshal(body)
	if err != nil {
		return err
	}
	asked, err := http.NewRequest(method, url+path, bytes.NewReader(encoded))
	if err != nil {
		return err
	}
	asked.Header.Set("content-type", "application/json")
	found, err := http.DefaultClient.Do(asked)
	if err != nil {
		return err
	}
	defer found.Body.Close()
	text, err := io.ReadAll(found.Body)
	if err != nil {
		return err
	}
	if found.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %d %s", method, path, found.StatusCode, text)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(text, answer)
}

func chance(count int) []byte {
	made := make([]byte, count)
	if _, err := rand.Read(made); err != nil {
		log.Fatal(err)
	}
	return made
}

// newID makes a UUID of version 7: milliseconds, then chance.
func newID() string {
	b := binary.BigEndian.AppendUint64(nil, uint64(time.Now().UnixMilli())<<16)
	b = append(b[:6], chance(10)...)
	b[6] = b[6]&0x0f | 0x70
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// insert is the transaction: it writes a row once. It returns what is there: this text, or that of whoever came first.
func insert(table, name, text string) (string, error) {
	path := filepath.Join(directory, table, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	draft, err := os.CreateTemp(filepath.Dir(path), name)
	if err != nil {
		return "", err
	}
	_, err = draft.WriteString(text)
	if err = errors.Join(err, draft.Sync(), draft.Close()); err != nil {
		return "", err
	}
	err = os.Link(draft.Name(), path)
	if errors.Is(err, fs.ErrExist) {
		known, err := os.ReadFile(path)
		return string(known), err
	}
	return text, err
}

// place places an order. fails: the process dies before its commit, or before it can tell the outcome.
func place(item, fails string) error {
	id := newID()
	body, err := json.Marshal(object{"item": item})
	if err != nil {
		return err
	}
	half := object{"id": id, "check_after": 0.5, "messages": []object{{"topic": topic, "key": item, "body": string(body)}}}
	var stored struct{ Items []struct{ Status int } }
	err = request("POST", "/v1/transactions", object{"producer_group": group, "transactions": []object{half}}, &stored)
	if err != nil {
		return err
	}
	if stored.Items[0].Status != 201 {
		return fmt.Errorf("the half was refused with %d", stored.Items[0].Status) // roll back, and say so
	}
	if fails == "before the commit" {
		return nil
	}
	state, err := insert("transactions", id, "COMMIT")
	if err != nil {
		return err
	}
	if state != "COMMIT" {
		return fmt.Errorf("order %s was rolled back by a check: it took too long", item)
	}
	if fails == "after the commit" {
		return nil
	}
	outcomes := object{"producer_group": group, "outcomes": []object{{"id": id, "outcome": "COMMIT"}}}
	if err := request("POST", "/v1/transactions/outcomes", outcomes, nil); err != nil {
		log.Printf("%v: the server will ask", err)
	}
	return nil
}

// answerChecks answers checks until it is over. A row that is missing is written, so that its transaction cannot commit.
func answerChecks(isOver *atomic.Bool) error {
	for !isOver.Load() {
		var asked struct{ Checks []struct{ ID, Token string } }
		poll := object{"producer_group": group, "instance": fmt.Sprintf("go-%d", os.Getpid()), "wait": 1, "max": 100}
		if err := request("POST", "/v1/checks/poll", poll, &asked); err != nil {
			return err
		}
		var outcomes []object
		for _, check := range asked.Checks {
			outcome, err := insert("transactions", check.ID, "ROLLBACK")
			if err != nil {
				return err
			}
			outcomes = append(outcomes, object{"id": check.ID, "check": check.Token, "outcome": outcome})
		}
		if len(outcomes) == 0 {
			continue
		}
		answer := object{"producer_group": group, "outcomes": outcomes}
		if err := request("POST", "/v1/transactions/outcomes", answer, nil); err != nil {
			return err
		}
	}
	return nil
}

// consume handles so many messages, each id once.
func consume(count int) error {
	const path = "/v1/groups/points-go"
	if err := request("PUT", path+"/subscriptions/"+topic, object{"start": "earliest"}, nil); err != nil {
		return err
	}
	for handled := 0; handled < count; {
		var found struct{ Messages []struct{ ID, Receipt, Body string } }
		wanted := object{"instance": fmt.Sprintf("go-%d", os.Getpid()), "max": 10, "wait": 5, "lease": 30}
		if err := request("POST", path+"/receive", wanted, &found); err != nil {
			return err
		}
		var items []object
		for _, message := range found.Messages {
			mine := fmt.Sprintf("%x", chance(8))
			there, err := insert("points", message.ID, mine)
			if err != nil {
				return err
			}
			if there == mine { // else it took effect before
				var order struct{ Item string }
				if err := json.Unmarshal([]byte(message.Body), &order); err != nil {
					return err
				}
				fmt.Println("points for", order.Item)
				handled++
			}
			items = append(items, object{"receipt": message.Receipt, "action": "ack"})
		}
		if len(items) == 0 {
			continue
		}
		if err := request("POST", path+"/settle", object{"items": items}, nil); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: shop URL DIRECTORY")
	}
	url, directory = os.Args[1], os.Args[2]
	var isOver atomic.Bool
	checks := make(chan error, 1)
	go func() { checks <- answerChecks(&isOver) }()
	err := errors.Join(place("book", ""), place("lamp", "after the commit"), place("ghost", "before the commit"))
	if err == nil {
		err = consume(2)
	}
	isOver.Store(true)
	if err = errors.Join(err, <-checks); err != nil {
		log.Fatal(err)
	}
}
