// Makes the search work when the pages are opened from disk, where browsers refuse to start a worker.
// The script of the worker runs in a hidden frame instead. Material for MkDocs looks for `IFrameWorker` by this name.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.worker = this;
      this.frame.srcdoc =
        `<script>self.postMessage = data => frameElement.worker.receive(data)</script><script src="${url}"></script>`;
      this.ready = new Promise(resolve => this.frame.addEventListener("load", resolve, { once: true }));
      document.documentElement.appendChild(this.frame);
    }
    receive(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
